"""The kernel that puts a window's K and V into the cache; no op of the domain."""

"""The `rope` op."""

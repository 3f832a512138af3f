"""The `attention` op."""

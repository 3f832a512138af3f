"""The `group_linear` op."""

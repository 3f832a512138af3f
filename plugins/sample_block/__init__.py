"""The `sample_block` op."""

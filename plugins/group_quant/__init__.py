"""The `group_quant` op."""

"""The `attention_fill` op."""

"""The `attention_window` op."""

"""The `attention_reuse` op."""

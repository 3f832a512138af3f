"""The `swiglu_quant` op."""

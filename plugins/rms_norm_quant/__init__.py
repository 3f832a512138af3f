"""The `rms_norm_quant` op."""

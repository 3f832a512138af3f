"""The `swiglu` op."""

"""Which positions a denoising step commits: pure functions on NumPy arrays."""

"""Parts of ``examples/train_tiny.py``: checkpoint format, data, objective, decoding."""

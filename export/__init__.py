"""Checkpoint to bundle: ONNX graphs, one weights file, manifest."""

"""The ops, one folder each: torch reference, ONNX function body, Triton kernel, TensorRT plugin."""

"""Small onnx_ir passes, one file each."""

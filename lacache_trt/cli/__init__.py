"""The command line, `lacache-trt`."""

"""The ONNX Runtime engine: the embedded default, runs on any CPU without torch."""

from __future__ import annotations

from lacache_trt.engines.onnxruntime.build import build as build
from lacache_trt.engines.onnxruntime.engine import load as load

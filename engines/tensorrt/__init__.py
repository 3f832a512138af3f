"""The TensorRT and TensorRT-RTX engines."""

from __future__ import annotations

from lacache_trt.engines.tensorrt.build import build as build

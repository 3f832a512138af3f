"""The CUDA engine: the torch module with Triton kernels, static buffers and CUDA graphs."""

from __future__ import annotations

from lacache_trt.engines.cuda.build import build as build
from lacache_trt.engines.cuda.engine import load as load

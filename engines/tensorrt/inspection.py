"""What TensorRT made of a graph: its layers as JSON."""

from __future__ import annotations

from typing import Any

from lacache_trt.engines.tensorrt.interrupts import Interrupts, interrupts_kept
from lacache_trt.engines.tensorrt.logger import new_logger
from lacache_trt.gpus import find_gpus


def layers_json(trt: Any, plan: Any) -> str | None:
    """The engine inspector's report, or None without a GPU, where no plan can be opened."""
    if not find_gpus().devices:
        return None
    with interrupts_kept() as interrupts:
        return _inspect(trt, plan, interrupts)


def _inspect(trt: Any, plan: Any, interrupts: Interrupts) -> str | None:
    logger = new_logger(trt, interrupts)
    engine = trt.Runtime(logger).deserialize_cuda_engine(plan)
    if engine is None:
        return None
    inspector = engine.create_engine_inspector()
    return str(inspector.get_engine_information(trt.LayerInformationFormat.JSON))

"""lacache-trt: diffusion language models from checkpoint to production inference.

Importing this package loads neither torch nor onnx nor an engine; names resolve on first use.
"""

from __future__ import annotations

from importlib import import_module
from os.path import dirname, isdir, join
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lacache_trt.errors import LaCacheError as LaCacheError
    from lacache_trt.generation import GenerationConfig as GenerationConfig
    from lacache_trt.generation import GenerationResult as GenerationResult
    from lacache_trt.generation import StepEvent as StepEvent
    from lacache_trt.runtime import Runtime as Runtime

__version__ = "0.1.0"

# Python that runs in a checkout finds this folder before what is installed. The subpackages
# export, engines and plugins, which an installation puts inside of it, stand beside it there.
if not isdir(join(__path__[0], "engines")) and isdir(join(dirname(__path__[0]), "engines")):
    __path__.append(dirname(__path__[0]))

_HOMES = {
    "GenerationConfig": "lacache_trt.generation",
    "GenerationResult": "lacache_trt.generation",
    "LaCacheError": "lacache_trt.errors",
    "Runtime": "lacache_trt.runtime",
    "StepEvent": "lacache_trt.generation",
}
__all__ = ["GenerationConfig", "GenerationResult", "LaCacheError", "Runtime", "StepEvent"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'lacache_trt' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])

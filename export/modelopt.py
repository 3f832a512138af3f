"""Scales from NVIDIA ModelOpt: its quantisers look at the weights, our files hold the result.

`mtq.quantize` runs on one piece of one linear at a time, so memory stays bounded. Of ModelOpt's
state only the largest magnitudes are taken; its own file formats are pickles and cannot say that
inputs are quantised at run time. Installed by the extra `fp8`; nothing else here needs it.
"""

from __future__ import annotations

import warnings
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from lacache_trt.errors import MissingDependencyError
from lacache_trt.model.config import Granularity
from lacache_trt.plugins.fp8 import GROUP, scales

E4M3_BITS = (4, 3)


def weight_config(granularity: Granularity = "per-group") -> dict[str, Any]:
    """ModelOpt's configuration for 128 x 128 blocks or rows; later entries of the list win."""
    shared: dict[str, Any] = {"block_sizes": {-1: GROUP, -2: GROUP}}
    if granularity == "per-channel":
        shared = {"axis": 0}
    return {
        "quant_cfg": [
            {"quantizer_name": "*", "enable": False},
            {
                "quantizer_name": "*weight_quantizer",
                "cfg": {"num_bits": E4M3_BITS, **shared},
                "enable": True,
            },
        ],
        "algorithm": "max",
    }


def modelopt_scales(weight: Tensor, granularity: Granularity = "per-group") -> Tensor:
    """ModelOpt's amax / 448 of every 128 x 128 block or row of weight [out, in], in float32."""
    quantised = quantise_linear(weight, granularity)
    amax: Tensor = quantised.weight_quantizer.amax.float()
    if granularity == "per-channel":
        return scales(amax.flatten())
    return scales(amax.reshape(-(-weight.shape[0] // GROUP), -1))


def quantise_linear(weight: Tensor, granularity: Granularity = "per-group") -> Any:
    """A linear of this weight [out, in] after `mtq.quantize`; its blocks are padded."""
    mtq = _import_modelopt()
    outputs, inputs = weight.shape
    padding = -outputs % GROUP if granularity == "per-group" else 0
    padded = nn.functional.pad(weight.float(), (0, 0, 0, padding))
    with torch.device("meta"):
        linear = nn.Linear(inputs, len(padded), bias=False)
    linear.weight = nn.Parameter(padded, requires_grad=False)
    example = torch.zeros(1, inputs)
    network = nn.Sequential(linear)
    with redirect_stdout(StringIO()):  # it prints; our results go there
        mtq.quantize(network, weight_config(granularity), lambda module: module(example))
    return network[0]


def _import_modelopt() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of versions of transformers, unused here
            import modelopt.torch.quantization as mtq
    except ImportError as error:
        raise MissingDependencyError(
            "quantising with ModelOpt needs a package that is not installed",
            got=f"missing {error.name}",
            fix='pip install "lacache-trt[fp8]", or leave --fp8-quantiser out',
        ) from error
    return mtq

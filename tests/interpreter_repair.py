"""Repairs three things of Triton 3.6's interpreter; import it before a kernel is launched.

- Its scalars are arrays of one element, and for loop bounds it calls `int` on them, which NumPy 2.4
  refuses.
- Its conversions to and from E4M3 neither carry a rounded mantissa into the exponent, nor
  round ties to even, nor keep NaN, nor saturate, as the hardware does. Torch's do it here.
- Its fused multiply-add rounds twice. A product of two float32 is exact in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_original = interpreter._patch_lang_tensor
_convert = interpreter._convert_float
_original_fma = interpreter.InterpreterBuilder.create_fma


def _patched(tensor: Any, scope: Any) -> None:
    _original(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _convert_float(values: Any, source: Any, target: Any, rounding: Any) -> Any:
    given = torch.from_numpy(np.array(values))
    if (source, target) == (tl.float32, tl.float8e4nv):
        floats = given.view(torch.float32).clamp(-448, 448)
        return floats.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    if source == tl.float8e4nv and target in (tl.float32, tl.float16):
        wide = given.view(torch.float8_e4m3fn).float()
        if target == tl.float32:
            return wide.numpy().view(np.uint32)
        return wide.half().numpy().view(np.uint16)
    return _convert(values, source, target, rounding)


def _fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    if x.data.dtype != np.float32:
        return _original_fma(self, x, y, z)
    with np.errstate(all="ignore"):
        exact = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(exact.astype(np.float32), z.dtype.scalar)


interpreter._patch_lang_tensor = _patched
interpreter.InterpreterBuilder.create_fma = _fma
interpreter._convert_float = _convert_float

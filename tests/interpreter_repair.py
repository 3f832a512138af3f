"""Lets Triton 3.6's interpreter run with NumPy 2.4.

Its scalars are arrays of one element, and for loop bounds it calls `int` on them, which NumPy 2.4
refuses. Importing this module replaces that one conversion; import it before a kernel is launched.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_original = interpreter._patch_lang_tensor


def _patched(tensor: Any, scope: Any) -> None:
    _original(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patched

"""Integer expressions of an op's input dimensions, evaluated by the plugin library at run time.

A launch rule (grid, scalar arguments, condition), an output shape or a workspace size is such an
expression, for example `ceil_div(dimension("q", 2), 64) * dimension("q", 1)`. The operations are
those of TensorRT's dimension expressions. Instructions: `native/format.h`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lacache_trt.errors import EngineError

_CONSTANT, _DIMENSION = 16, 17
_OPERAND_LIMIT = 1 << 55
_AXES = 8


def _divide(left: int, right: int) -> int:
    if left < 0 or right <= 0:
        raise EngineError(
            "an expression divides by zero or a negative number", got=f"{left} / {right}"
        )
    return left // right


_OPERATIONS: dict[int, Callable[[int, int], int]] = {
    0: lambda left, right: left + right,
    1: lambda left, right: left * right,
    2: max,
    3: min,
    4: lambda left, right: left - right,
    5: lambda left, right: int(left == right),
    6: lambda left, right: int(left < right),
    7: _divide,
    8: lambda left, right: _divide(left, right) + int(left % right != 0),
}
_SUM, _PRODUCT, _MAXIMUM, _MINIMUM, _DIFFERENCE, _EQUAL, _LESS, _FLOOR, _CEIL = _OPERATIONS


@dataclass(frozen=True)
class Expression:
    """A constant (`code` 16), a dimension of an input (17) or an operation on two expressions.

    Build with `constant`, `dimension`, the operators and the functions below.
    """

    code: int
    value: int = 0
    tensor: str = ""
    operands: tuple[Expression, ...] = ()

    def __add__(self, other: Operand) -> Expression:
        return _operation(_SUM, self, other)

    def __sub__(self, other: Operand) -> Expression:
        return _operation(_DIFFERENCE, self, other)

    def __mul__(self, other: Operand) -> Expression:
        return _operation(_PRODUCT, self, other)

    def __floordiv__(self, other: Operand) -> Expression:
        return _operation(_FLOOR, self, other)

    def __lt__(self, other: Operand) -> Expression:
        return _operation(_LESS, self, other)

    def __gt__(self, other: Operand) -> Expression:
        return _operation(_LESS, other, self)

    def evaluate(self, shapes: Mapping[str, Sequence[int]]) -> int:
        """The value for input shapes by tensor name."""
        if self.code == _CONSTANT:
            return self.value
        if self.code == _DIMENSION:
            return shapes[self.tensor][self.value]
        left, right = (operand.evaluate(shapes) for operand in self.operands)
        return _OPERATIONS[self.code](left, right)

    def instructions(self, inputs: Sequence[str]) -> list[int]:
        """Postfix words for a program whose inputs have these names."""
        if self.code == _CONSTANT:
            return [_CONSTANT | self.value << 8]
        if self.code == _DIMENSION:
            return [_DIMENSION | (inputs.index(self.tensor) * _AXES + self.value) << 8]
        left, right = (operand.instructions(inputs) for operand in self.operands)
        return [*left, *right, self.code]


Operand: TypeAlias = Expression | int


def constant(value: int) -> Expression:
    """A number."""
    if not -_OPERAND_LIMIT <= value < _OPERAND_LIMIT:
        raise EngineError("a constant does not fit an instruction", got=value)
    return Expression(_CONSTANT, value)


def dimension(tensor: str, axis: int) -> Expression:
    """Size of an axis of an input."""
    if not 0 <= axis < _AXES:
        raise EngineError("no tensor has such an axis", got=axis, expected=f"0 to {_AXES - 1}")
    return Expression(_DIMENSION, axis, tensor)


def ceil_div(left: Operand, right: Operand) -> Expression:
    """Quotient rounded up, of a non-negative and a positive number."""
    return _operation(_CEIL, left, right)


def minimum(left: Operand, right: Operand) -> Expression:
    """The smaller one."""
    return _operation(_MINIMUM, left, right)


def maximum(left: Operand, right: Operand) -> Expression:
    """The larger one."""
    return _operation(_MAXIMUM, left, right)


def equal(left: Operand, right: Operand) -> Expression:
    """1 if they are equal, else 0."""
    return _operation(_EQUAL, left, right)


def negation(condition: Expression) -> Expression:
    """1 for 0 and 0 for 1."""
    return constant(1) - condition


def _operation(code: int, left: Operand, right: Operand) -> Expression:
    operands = tuple(constant(side) if isinstance(side, int) else side for side in (left, right))
    if all(operand.code == _CONSTANT for operand in operands):
        return constant(_OPERATIONS[code](operands[0].value, operands[1].value))
    return Expression(code, operands=operands)

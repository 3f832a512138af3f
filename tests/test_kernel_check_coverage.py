"""What the GPU checks launch: every configuration that ships has to be among it.

No kernel runs here. The launches of a check are recorded by configuration; its comparisons, which
then see poisoned outputs, are ignored.
"""

from __future__ import annotations

from collections.abc import Callable

import benchmark_path  # noqa: F401
import pytest
import torch

pytest.importorskip("triton")

import fp8_checks
import fp8_inputs
import kernel_checks
import kernel_ptx
import window_checks
from kernel_jobs import Job, Ledger
from kernel_sweep import shipping_jobs

SM = 89
CHECKS = kernel_checks.CHECKS | window_checks.CHECKS | fp8_checks.CHECKS
# Checks without whole canvases of float64 attention, which take minutes on a CPU.
OPS = {
    "tokenwise": ("rms_norm.", "swiglu.", "rope."),
    "window": ("attention_window", "window_write"),
    "quantising": ("rms_norm_quant", "swiglu_quant", "group_quant"),
    "group_linear": ("group_linear",),
}


def record(
    kernel: kernel_ptx.PtxKernel, grid: tuple[int, ...], *arguments: object, num_warps: int,
    num_stages: int, **constants: object,
) -> None:  # fmt: skip
    """In place of a launch: which configuration it would have been."""
    types = tuple(
        kernel_ptx.TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"
        for value in arguments
    )
    key = kernel_ptx.key_of(types, constants, num_warps)
    assert kernel.instances[key][0].stages == num_stages
    kernel.loaded[key] = (None, 0)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_ptx.PtxKernel, "_launch", record)
    monkeypatch.setattr(fp8_checks, "LINEARS", fp8_checks.LINEARS[:3])
    for module in (kernel_checks, window_checks, fp8_checks, fp8_inputs):
        monkeypatch.setattr(module, "DEVICE", "cpu")


def launched(job: Job) -> set[str]:
    check: Callable[..., None] = CHECKS[job.check]
    arguments = {**job.arguments, **({"seeds": 1} if "seeds" in job.arguments else {})}
    with kernel_ptx.borrowed(SM) as kernels:
        check(Ledger(), **arguments)
    return {name for kernel in kernels for name in kernel.launched}


@pytest.mark.parametrize("check", OPS)
def test_checks_launch_what_ships(check: str) -> None:
    expected = {c.name for c in kernel_ptx.shipping(SM) if c.name.startswith(OPS[check])}
    found = set().union(*(launched(job) for job in shipping_jobs(SM) if job.check == check))
    assert expected
    assert expected - found == set()


def test_every_op_has_a_check() -> None:
    """No name of a configuration that ships is unknown to the checks."""
    attention = [f"attention_{name}" for name in ("fill", "reuse", "split", "merge")]
    known = [
        "attention.",
        "sample",
        *attention,
        *(name for names in OPS.values() for name in names),
    ]
    assert [c.name for c in kernel_ptx.shipping(SM) if not c.name.startswith(tuple(known))] == []
    planned = {job.check for job in shipping_jobs(SM)}
    assert planned == {"fill", "reuse", "attention", "sample", *OPS}

"""Check jobs: what one is, how many run at once, and the ledger of their comparisons.

A `Job` names a check function of `kernel_checks`, `window_checks` or `fp8_checks` and its
arguments, so that a pool of fresh processes can run many at once, which also compiles the kernels
in parallel and leaves them in Triton's cache for the timing that follows. A process that dies takes
only its own job with it.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context

import torch
from torch import Tensor


@dataclass(frozen=True)
class Job:
    """One check: the function's name in `CHECKS` and its keyword arguments.

    With `ptx_of` (89), the kernels are that SM's PTX (`kernel_ptx`).
    """

    check: str
    label: str
    arguments: dict[str, object] = field(default_factory=dict)
    ptx_of: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What a job found, and the configurations that it launched from PTX."""

    job: Job
    cases: int
    failures: tuple[str, ...]
    worst: float
    seconds: float
    launched: tuple[str, ...] = ()


class Ledger:
    """Counts comparisons, remembers failures and the worst error over its bound."""

    def __init__(self) -> None:
        self.cases = 0
        self.worst = 0.0
        self.failures: list[str] = []

    def bounded(self, name: str, got: Tensor, want: Tensor, bound: Tensor | float) -> None:
        """Every |got - want| within `bound` (broadcast); equal infinities count as equal."""
        self.cases += 1
        if got.numel() == 0:
            return
        error = (got.double() - want).abs()
        error = torch.where(got.double() == want, torch.zeros_like(error), error)
        ratio = float((error / bound).max())
        if not ratio <= 1.0:
            where = int(torch.nan_to_num(error / bound, nan=torch.inf).argmax())
            self.failures.append(
                f"{name}: error/bound {ratio:.3g} at flat index {where} of {tuple(got.shape)}"
            )
        self.worst = max(self.worst, ratio)

    def same(self, name: str, first: Iterable[Tensor], second: Iterable[Tensor]) -> None:
        """Both have the same values (NaN equal to NaN), of two runs or of an exact result."""
        self.cases += 1
        for left, right in zip(first, second, strict=True):
            other = ~((left == right) | (left.isnan() & right.isnan()))
            if bool(other.any()):
                count, where = int(other.sum()), int(other.flatten().int().argmax())
                self.failures.append(f"{name}: {count} values differ, the first at {where}")


def run_job(job: Job) -> Outcome:
    """Run one check; an exception is a failure of that job."""
    started = time.perf_counter()
    ledger = Ledger()
    torch.manual_seed(0)
    launched: tuple[str, ...] = ()
    try:
        launched = _run_check(job, ledger)
        torch.cuda.synchronize()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        ledger.failures.append(f"{type(error).__name__}: {error} ({last.name}:{last.lineno})")
    seconds = time.perf_counter() - started
    return Outcome(job, ledger.cases, tuple(ledger.failures), ledger.worst, seconds, launched)


def _run_check(job: Job, ledger: Ledger) -> tuple[str, ...]:
    import fp8_checks
    import kernel_checks
    import window_checks

    check = (kernel_checks.CHECKS | window_checks.CHECKS | fp8_checks.CHECKS)[job.check]
    if job.ptx_of is None:
        check(ledger, **job.arguments)
        return ()
    from kernel_ptx import borrowed

    with borrowed(job.ptx_of) as kernels:
        check(ledger, **job.arguments)
    return tuple(name for kernel in kernels for name in kernel.launched)


def run_jobs(jobs: list[Job], workers: int) -> list[Outcome]:
    """Run the jobs in a pool of fresh processes, or in this one with `workers` 0."""
    if workers == 0:
        return [run_job(job) for job in jobs]
    outcomes = []
    with ProcessPoolExecutor(workers, get_context("spawn"), max_tasks_per_child=1) as pool:
        pending = {pool.submit(run_job, job): job for job in jobs}
        for future in as_completed(pending):
            try:
                outcomes.append(future.result())
            except Exception as error:
                message = f"the process died: {error}"
                outcomes.append(Outcome(pending[future], 0, (message,), 0.0, 0.0))
    return outcomes

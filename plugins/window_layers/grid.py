"""How a persistent grid shares the work of a phase, and how it waits between phases."""

# mypy: ignore-errors
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(32)
"""Rows of a window, padded."""


@gluon.jit
def arrive(counter):
    """Tell the grid that this program has finished a phase, once per program.

    One thread does: the release at GPU scope orders what all threads wrote before, because it
    stands behind a block barrier.
    """
    gl.thread_barrier()
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 p, thread, 0;
        @p red.release.gpu.global.add.u32 [$1], 1;
        mov.u32 $0, 0;
        }""",
        "=r,l",
        [counter.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait(counter, arrivals):
    """Wait until the programs have arrived `arrivals` times in all since `counter` was zero."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .u32 thread, seen;
        mov.u32 thread, %tid.x;
        setp.ne.u32 p, thread, 0;
        @p bra DONE;
        SPIN:
        ld.acquire.gpu.global.u32 seen, [$1];
        setp.lt.u32 p, seen, $2;
        @p bra SPIN;
        DONE:
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [counter.to(gl.int64), arrivals],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    gl.thread_barrier()


@gluon.jit
def wait_to_copy(counter, arrivals):
    """`wait` for a warp that copies what the grid has written: every lane waits for itself."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .u32 seen;
        SPIN:
        ld.acquire.gpu.global.u32 seen, [$1];
        setp.lt.u32 p, seen, $2;
        @p bra SPIN;
        fence.proxy.async.global;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [counter.to(gl.int64), arrivals],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def first_step(total, program, programs):
    """The first of a product's `total` steps that a program does; its last ends at its next's."""
    return program * total // programs


@gluon.jit
def owner(total, step, programs):
    """The program that does a step; the inverse of `first_step`."""
    return ((step + 1) * programs - 1) // total

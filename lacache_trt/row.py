"""Where one row of a batch stands: its block, its counters, its timings."""

from __future__ import annotations

from dataclasses import dataclass, field

from lacache_trt.results import BlockTiming


@dataclass
class Row:
    """One row while it is decoded.

    Attributes:
        seed: of its noise.
        end: blocks that its answer has; fewer once it was cut.
        block: the block that is being denoised.
        step_in_block: steps that the block has taken.
        forwards: steps that the row has taken.
        committed: tokens that the model committed.
        finished: the answer is complete.
        waiting: the block is complete, and others of the batch are not.
        ended: the finished answer holds an end token that was predicted.
        memory: what the policy remembers of the block.
        fill_s: seconds of the block's fills.
        steps_s: seconds of the block's steps.
        timings: the blocks that are complete.
    """

    seed: int
    end: int
    block: int = 0
    step_in_block: int = 0
    forwards: int = 0
    committed: int = 0
    finished: bool = False
    waiting: bool = False
    ended: bool = False
    memory: object = None
    fill_s: float = 0.0
    steps_s: float = 0.0
    timings: list[BlockTiming] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        """The next step changes nothing in this row."""
        return self.finished or self.waiting

    def count_step(self, committed: int) -> None:
        """One more step, which committed so many tokens."""
        self.forwards += 1
        self.step_in_block += 1
        self.committed += committed

    def close_block(self, *, finished: bool) -> None:
        """Book the block; the row ends, or waits to begin the next one."""
        timing = BlockTiming(self.block, self.step_in_block, self.fill_s, self.steps_s)
        self.timings.append(timing)
        self.step_in_block, self.fill_s, self.steps_s = 0, 0.0, 0.0
        self.memory = None
        self.finished, self.waiting = finished, not finished

    def begin_block(self) -> None:
        """Stop waiting."""
        self.waiting = False
        self.block += 1

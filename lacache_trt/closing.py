"""Objects that hold resources until `close`, usable in a `with` statement."""

from __future__ import annotations

from types import TracebackType
from typing import TypeVar

Closes = TypeVar("Closes", bound="ClosesOnExit")


class ClosesOnExit:
    """Calls `close` when the `with` block ends, however it ends."""

    def close(self) -> None:
        """Release what is held; closing twice is allowed."""
        raise NotImplementedError

    def __enter__(self: Closes) -> Closes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

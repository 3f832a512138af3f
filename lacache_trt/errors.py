"""Typed errors: each says what went wrong, what was found, what was expected, how to fix it.

Every error that the toolkit raises on purpose derives from `LaCacheError`, so a service can catch
one class. `exit_code` is what the command line returns (0 ok, 1 a check failed or a deadline
passed, 2 usage, 3 environment or artefact mismatch, 130 interrupted, 143 stopped by SIGTERM).
"""

from __future__ import annotations


class LaCacheError(Exception):
    """Base class. The message is assembled from its parts so that none of them is forgotten."""

    exit_code = 3

    def __init__(
        self,
        what: str,
        *,
        got: object | None = None,
        expected: object | None = None,
        fix: str | None = None,
    ) -> None:
        self.what = what
        self.got = got
        self.expected = expected
        self.fix = fix
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        if self.got is not None:
            lines.append(f"  got:      {self.got}")
        if self.expected is not None:
            lines.append(f"  expected: {self.expected}")
        if self.fix is not None:
            lines.append(f"  fix:      {self.fix}")
        return "\n".join(lines)


class CheckpointError(LaCacheError):
    """A checkpoint directory is missing, incomplete, corrupt or contradicts its own config."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint is readable but belongs to a model family that the toolkit cannot run."""


class ArtifactError(LaCacheError):
    """A bundle or engine directory is missing, incomplete, tampered with or of another version."""


class OutputError(LaCacheError):
    """An output directory cannot be written (exists, no permission, disk full)."""


class MissingDependencyError(LaCacheError):
    """An optional package or a device that the request needs is not there."""


class EngineError(LaCacheError):
    """An engine failed while building or executing."""


class CapacityError(EngineError):
    """A request is larger than what the engine or the model can hold."""


class NumericalError(EngineError):
    """The model produced NaN or infinite logits."""


class QuantisationError(LaCacheError):
    """A model cannot be quantised as asked, or quantised data are broken."""


class InvalidRequestError(LaCacheError, ValueError):
    """A prompt or a generation setting is not valid. Also a `ValueError`."""

    exit_code = 2


class CancelledError(LaCacheError):
    """Generation was cancelled between two steps."""

    exit_code = 130


class DeadlineExceededError(CancelledError):
    """Generation passed its deadline between two steps."""

    exit_code = 1


class VerificationError(LaCacheError):
    """A numerical check failed: what was exported or built does not do what the model does."""

    exit_code = 1

"""What `--save-result` and `--plot` of the `bench` verbs write, besides the result on stdout."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lacache_trt.cli.output import Output
from lacache_trt.errors import InvalidRequestError
from lacache_trt.output_file import check_output_file, check_picture_file, replaced_file


@dataclass(frozen=True)
class ResultFiles:
    """The files of one measurement, which has cost more than to lose it over one of them.

    So a failure to draw or to save is kept until the result is printed, and raised then. With
    `--json` stdout thereby holds the result; the failure is on stderr and in the exit code.
    """

    report: Path | None
    picture: Path | None
    _failures: list[Exception] = field(default_factory=list)

    @classmethod
    def checked(cls, report: Path | None, picture: Path | None = None) -> ResultFiles:
        """Raise for what can be known before the measurement.

        Raises:
            OutputError: see `check_output_file`.
            InvalidRequestError: both are one file, or the picture is no PNG.
        """
        if report is not None:
            check_output_file(report, "the report")
        if picture is not None:
            check_picture_file(picture)
        if report is not None and picture is not None and report.resolve() == picture.resolve():
            raise InvalidRequestError(
                "the report and the picture are one file",
                got=f"--save-result {report} --plot {picture}",
                expected="two files",
                fix=f"save the report as {report.with_suffix('.json')}",
            )
        return cls(report, picture)

    def draw(self, draw: Callable[[Path], None]) -> Path | None:
        """Where the picture is, once `draw` has written it; None if that failed."""
        if self.picture is None:
            return None
        try:
            with replaced_file(self.picture, "the picture") as fresh:
                draw(fresh)
        except Exception as error:
            self._failures.append(error)
            return None
        return self.picture

    def save(self, data: Mapping[str, object]) -> None:
        """Write the report, if that is wanted.

        Raises:
            OutputError: it cannot be written; what stood there stays.
        """
        if self.report is None:
            return
        text = json.dumps(data, indent=1) + "\n"
        with replaced_file(self.report, "the report") as fresh:
            fresh.write_text(text, encoding="utf-8")

    def deliver(
        self, output: Output, data: Mapping[str, object], render: Callable[[], None]
    ) -> None:
        """Save and print the result, then raise the first failure to write a file."""
        try:
            self.save(data)
        except Exception as error:
            self._failures.append(error)
        output.result(data, render)
        if self._failures:
            raise self._failures[0]

"""Where a command's words go: people on a terminal, pipes, and scripts that want JSON.

Results go to standard output, remarks and progress to standard error, so that
``graphpipe ... --json | jq`` and ``> file`` hold results alone. On a terminal rich draws
tables and progress bars; into a pipe goes plain text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

PLAIN_WIDTH = 160
"""Columns of a table that goes into a pipe."""


class Bar:
    """A progress bar; shows nothing where there is no terminal, or quiet was asked for.

    It appears with the first call, so it may be made in one process and used in a child.
    """

    def __init__(self, description: str, bars: Progress | None) -> None:
        self._bars = bars
        self._shown = False
        if bars is not None:
            self._task = bars.add_task(description, total=None, note="")

    @property
    def console(self) -> Console | None:
        """Where to print while the bar is shown; None while it is not."""
        return self._bars.console if self._bars is not None and self._shown else None

    def __call__(self, done: int, total: int | None = None, note: str = "") -> None:
        """``done`` of ``total`` steps; ``note`` stands beside the bar. The last step closes it."""
        if self._bars is None:
            return
        if not self._shown:
            self._bars.start()
            self._shown = True
        self._bars.update(self._task, completed=done, total=total, note=note)
        if done == total:
            self.close()

    def close(self) -> None:
        """Takes the bar off the screen."""
        if self._bars is not None and self._shown:
            self._bars.stop()
            self._shown = False


class Output:
    """One command's output.

    Args:
        as_json: Print one JSON document and nothing else on standard output.
        quiet: Print no remarks and no progress, and no tables either.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self._out = Console()
        self._err = Console(stderr=True)
        self._bar: Bar | None = None
        if not self._out.is_terminal:
            self._out = Console(width=PLAIN_WIDTH, no_color=True)

    @property
    def width(self) -> int:
        """Columns that text pictures may use."""
        return self._out.width

    def text(self, value: object) -> None:
        """Prints ``str(value)`` as it is, unless quiet or JSON was asked for."""
        if not self.quiet and not self.as_json:
            self._console().print(Text(str(value)), soft_wrap=True)

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Prints a table; numbers are set to the right."""
        if self.quiet or self.as_json:
            return
        body = [[str(cell) for cell in row] for row in rows]
        table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
        for i, name in enumerate(columns):
            numeric = bool(body) and all(row[i][:1] in "0123456789-+." for row in body)
            table.add_column(Text(name), justify="right" if numeric else "left", overflow="fold")
        for row in body:
            table.add_row(*(Text(cell) for cell in row))
        self._console().print(table)

    def note(self, value: object) -> None:
        """Prints a remark to standard error, unless quiet."""
        if not self.quiet:
            self._err.print(Text(str(value)), soft_wrap=True)

    def result(self, value: object) -> None:
        """Prints the command's result as JSON if that was asked for."""
        if self.as_json:
            print(json.dumps(value, indent=1, default=_jsonable, allow_nan=False))

    def bar(self, description: str) -> Bar:
        """A progress bar on standard error, until its last step or until it is closed."""
        if self.quiet or not self._err.is_terminal:
            return Bar(description, None)
        bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self._err,
            transient=True,
        )
        self._bar = Bar(description, bars)
        return self._bar

    @contextmanager
    def progress(self, description: str) -> Iterator[Bar]:
        """A progress bar for the time of a block."""
        bar = self.bar(description)
        try:
            yield bar
        finally:
            bar.close()

    def _console(self) -> Console:
        """Standard output; on a terminal, the bar's console while there is one."""
        live = None if self._bar is None else self._bar.console
        return live if live is not None and self._out.is_terminal else self._out


def _jsonable(value: object) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} has no JSON form")

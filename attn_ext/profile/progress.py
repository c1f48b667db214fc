"""A bar on stderr while something is measured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Called as progress(done, total, what is being done).
Progress = Callable[[int, int, str], None]


@contextmanager
def progress_bar() -> Iterator[Progress | None]:
    """A Progress while stderr is a terminal and rich is installed; else None."""
    if not sys.stderr.isatty():
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
    except ImportError:
        yield None
        return
    # No thread that redraws the bar: it would take the interpreter from the calls being timed.
    columns = (BarColumn(), TextColumn("{task.description}"))
    with Progress(
        *columns, console=Console(stderr=True), transient=True, auto_refresh=False
    ) as bar:
        task = bar.add_task("starting")
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total, description=what, refresh=True
        )

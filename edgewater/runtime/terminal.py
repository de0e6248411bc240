"""Text for terminals. Names and values may come from other machines, so their control characters are never printed."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from edgewater.base.errors import EdgewaterError, plain

WIDTH = 200  # limit: the width of output
"""The width of the output in columns if it is no terminal."""


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, markup=False, emoji=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> Table:
    made = Table(box=None, padding=(0, 2, 0, 0), title=title, title_justify="left")
    for column in columns:
        made.add_column(Text(plain(column)), overflow="fold")
    for row in rows:
        made.add_row(*(Text(plain(cell)) for cell in row))
    return made


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], empty: str) -> None:
    """Prints the rows, or `empty` if there are none."""
    show(table(columns, rows) if rows else Text(empty))


def show(value: RenderableType) -> None:
    console().print(value)


def show_again(view: Callable[[], RenderableType], interval_s: float, once: bool) -> None:
    """Prints a view once. On a terminal, shows it every `interval_s` seconds until Ctrl-C, unless `once` is true.

    On the terminal, the message of an `EdgewaterError` replaces the view for a time, because the error may end.
    """
    screen = console()
    if once or not screen.is_terminal:
        screen.print(view())
        return
    with contextlib.suppress(KeyboardInterrupt), Live(console=screen, screen=True, auto_refresh=False) as live:
        while True:
            try:
                shown = view()
            except EdgewaterError as exc:
                shown = Text(plain(exc.message))
            live.update(shown, refresh=True)
            time.sleep(interval_s)

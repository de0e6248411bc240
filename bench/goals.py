"""`python -m bench.goals [NAME…] [--all] [--list]`: runs the benches of `bench/goals.toml`, and judges their figures.

A figure is *lost* if its value is beyond its limit by more than its noise. It *failed* if its command fails or writes
no value. It was *not run* if its data set is not on this machine.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

GOALS = Path(__file__).with_name("goals.toml")
DAILY_MINUTES = 10.0
"""Benches that take longer run with `--all` only."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure that a document states.

    Attributes:
        page: the document.
        value: a Python expression over `data`, the content of the bench's file.
        most, least: the largest or the least value that keeps the goal. A figure has one of them.
        noise: the share by which a value may miss its limit.
    """

    name: str
    page: str
    value: str
    most: float | None = None
    least: float | None = None
    noise: float = 0.0

    @property
    def limit(self) -> str:
        sign, limit = ("≤", self.most) if self.least is None else ("≥", self.least)
        return f"{sign} {limit:g}" + (f" ± {self.noise:.0%}" if self.noise else "")

    def verdict(self, data: Any) -> tuple[str, str]:
        """Returns ``kept``, ``LOST`` or ``FAILED``, and the value or the reason."""
        try:
            value = float(eval(self.value, {"data": data}))  # an expression of this repository
        except Exception as exc:
            return "FAILED", f"{self.value}: {type(exc).__name__}: {exc}"
        if self.least is not None:
            kept = value >= self.least * (1 - self.noise)
        else:
            kept = self.most is not None and value <= self.most * (1 + self.noise)
        return "kept" if kept else "LOST", f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class Bench:
    """A command that measures figures. `needs` is a folder that it reads, and that not every machine has."""

    command: str
    minutes: float
    figures: tuple[Figure, ...]
    file: str | None = None
    needs: str | None = None

    def run(self) -> Any:
        """Returns the JSON that the command writes. Raises RuntimeError, OSError or ValueError."""
        words = [sys.executable if word == "python" else word for word in shlex.split(self.command)]
        began = time.time()  # noqa: TID251
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip()[-500:]}")
        if self.file is None:
            return json.loads(done.stdout)
        if Path(self.file).stat().st_mtime < began - 2.0:  # file systems round times
            raise RuntimeError(f"{self.file} is of an earlier run")
        return json.loads(Path(self.file).read_text())

    def verdicts(self) -> Iterator[tuple[Figure, str, str]]:
        if self.needs and not Path(self.needs).exists():
            yield from ((figure, "not run", f"no {self.needs}") for figure in self.figures)
            return
        try:
            data = self.run()
        except (RuntimeError, OSError, ValueError) as exc:
            yield from ((figure, "FAILED", str(exc)) for figure in self.figures)
            return
        yield from ((figure, *figure.verdict(data)) for figure in self.figures)


def benches(path: Path) -> list[Bench]:
    entries = tomllib.loads(path.read_text())["bench"]
    return [Bench(figures=tuple(Figure(**each) for each in entry.pop("figure")), **entry) for entry in entries]


@click.command()
@click.argument("names", nargs=-1)
@click.option("--all", "every", is_flag=True, help=f"Also benches that take {DAILY_MINUTES:g} minutes and more.")
@click.option("--list", "listed", is_flag=True, help="List figures, limits and commands, and run nothing.")
@click.option("--file", "path", type=click.Path(path_type=Path), default=GOALS, help="The figures.")
def main(names: tuple[str, ...], every: bool, listed: bool, path: Path) -> None:
    """Measure the benches of the figures NAMES; by default, all that take less than ten minutes."""
    known = benches(path)
    if unknown := set(names) - {figure.name for bench in known for figure in bench.figures}:
        raise click.UsageError(f"no figure {', '.join(sorted(unknown))}; --list shows all")
    lost = False
    for bench in known:
        named = any(figure.name in names for figure in bench.figures)
        if not (named if names else every or listed or bench.minutes < DAILY_MINUTES):
            continue
        if listed:
            click.echo(f"{bench.command}  ({bench.minutes:g} min)")
        for figure, word, text in ((f, "", f.limit) for f in bench.figures) if listed else bench.verdicts():
            click.echo(f"{word:8}{figure.name:34}{text}" + ("" if listed else f", {figure.limit} ({figure.page})"))
            lost |= word in ("LOST", "FAILED")
    sys.exit(lost)


if __name__ == "__main__":
    main()

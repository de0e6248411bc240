"""A soak: episodes on one center until the time is up, and the report."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sim.demo.run import Demo
from tests.center.postgres import find_binaries, serving
from tests.e2e.soak.episode import EpisodeResult, EpisodeRun
from tests.e2e.soak.plan import draw_episode
from tests.e2e.soak.system import Center, SoakFailed
from tests.e2e.soak.warehouse import Warehouse
from tests.simulation.checkers import Falsehood, Outcome, false_confidences

SHOWN_OF_A_KIND = 4


@dataclass(slots=True)
class Report:
    """What a soak found.

    Attributes:
        failed: episodes that the soak could not finish, with the reason.
    """

    seed: int
    results: list[EpisodeResult] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def confidences(self) -> list[Falsehood]:
        """Confidences that are false over all episodes."""
        outcomes: list[Outcome] = [o for r in self.results for o in r.findings.outcomes]
        return false_confidences(outcomes)

    @property
    def false(self) -> int:
        return sum(len(r.findings.false) for r in self.results) + len(self.confidences)

    @property
    def exit_status(self) -> int:
        return 1 if self.false or self.failed or not self.results else 0

    def by_kind(self) -> dict[str, dict[str, int]]:
        """Per kind of fault: episodes, answers, cells and false statements of the episodes that it happened in."""
        counts: dict[str, Counter[str]] = {}
        for result in self.results:
            for kind in result.episode.kinds:
                found = counts.setdefault(kind, Counter())
                found["episodes"] += 1
                found["answers"] += result.findings.answers
                found["cells"] += result.findings.cells
                found["false"] += len(result.findings.false)
        return {kind: dict(found) for kind, found in sorted(counts.items())}

    def to_json(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "seconds": round(self.seconds),
            "episodes": [
                {
                    **r.episode.to_json(),
                    "answers": r.findings.answers,
                    "cells": r.findings.cells,
                    "false": [str(f) for f in r.findings.false],
                    "skipped": r.skipped,
                }
                for r in self.results
            ],
            "by_kind": self.by_kind(),
            "confidences": [str(f) for f in self.confidences],
            "failed": self.failed,
        }

    def summary(self) -> str:
        """One line."""
        total = Counter[str]()
        for r in self.results:
            total["answers"] += r.findings.answers
            total["cells"] += r.findings.cells
            total["records"] += r.records
            total["reads"] += r.reads
        return (
            f"soak: seed {self.seed}, {self.seconds:.0f} s, {len(self.results)} episodes, {len(self.by_kind())} kinds "
            f"of faults, {total['records']} records, {total['answers']} answers ({total['reads']} reads), "
            f"{total['cells']} cells compared, {len(self.failed)} episodes not finished, "
            f"{self.false} false statements"
        )


class Soak:
    """Runs episodes of a seed.

    Args:
        at_once: kinds of faults in an episode, at most.
        say: prints a line.
        demo: a running center to use; None: the soak starts one of its own.
    """

    def __init__(
        self,
        directory: Path,
        seed: int,
        kinds: Sequence[str],
        *,
        at_once: int = 2,
        drivers: int = 1,
        say: Callable[[str], None] = lambda _: None,
        demo: Demo | None = None,
    ) -> None:
        self.directory, self.seed, self.kinds, self.at_once = directory, seed, kinds, at_once
        self._say, self._demo, self._drivers = say, demo, drivers

    def run(self, seconds: float, *, only: int | None = None, most: int | None = None, keep: bool = False) -> Report:
        """Runs episodes until `seconds` are over, or the only one, or at most so many."""
        report, began = Report(self.seed), time.monotonic()
        settings = {"spark": {"drivers": self._drivers, "standby": True}} if self._drivers > 1 else {}
        binaries = find_binaries() if self._demo is None else None
        with ExitStack() as stack:
            warehouse = None if binaries is None else Warehouse(stack.enter_context(serving(binaries)))
            if warehouse is None and self._demo is None:
                self._say("PostgreSQL is not installed: no sink is compared")
            settings |= {} if warehouse is None else warehouse.settings
            demo = self._demo or Demo(self.directory / "center", seconds, settings=settings)
            self._run_episodes(demo, warehouse, report, began + seconds, only, most, keep)
        report.seconds = time.monotonic() - began
        for kind, found in report.by_kind().items():
            self._say(f"{kind:14s} {found}")
        for false in report.confidences:
            self._say(f"FALSE {false}")
        return report

    def _run_episodes(
        self,
        demo: Demo,
        warehouse: Warehouse | None,
        report: Report,
        until_s: float,
        only: int | None,
        most: int | None,
        keep: bool,
    ) -> None:
        try:
            if self._demo is None:
                demo.directory.mkdir(parents=True)
                demo.start_center()
            number = only or 0
            while time.monotonic() < until_s and number != most:
                center = Center(demo)
                self._run_episode(number, center, warehouse, report, keep)
                number += 1
                if only is not None or not center.is_alive():
                    break
        finally:
            if self._demo is None:
                demo.stop()
                if not keep:
                    shutil.rmtree(self.directory, ignore_errors=True)

    def _run_episode(
        self, number: int, center: Center, warehouse: Warehouse | None, report: Report, keep: bool
    ) -> None:
        episode = draw_episode(self.seed, number, self.kinds, self.at_once)
        directory = self.directory / f"episode{number}"
        try:
            result = EpisodeRun(episode, center, directory, warehouse).run()
        except SoakFailed as exc:
            report.failed.append(f"episode {number}: {exc}")
            self._say(f"NOT FINISHED episode {number} ({', '.join(episode.kinds)}): {exc}")
            return
        report.results.append(result)
        found = result.findings
        self._say(
            f"episode {number} ({', '.join(episode.kinds)}; {'+'.join(episode.queries)}): {result.records} records, "
            f"{found.answers} answers, {found.cells} cells, {len(found.false)} false, {result.seconds:.0f} s"
        )
        shown = Counter[str]()
        for false in found.false:
            shown[false.kind] += 1
            if shown[false.kind] <= SHOWN_OF_A_KIND:
                self._say(f"  FALSE {false}")
        if found.false:
            self._say(f"  false by kind: {dict(shown)}")
        for text in result.skipped:
            self._say(f"  skipped {text}")
        if not found.false and not keep:
            shutil.rmtree(directory, ignore_errors=True)

"""Runs worlds by their seeds: `python -m tests.simulation --seeds 0..10000 --jobs 2`, or one, `--seed 17 --trace`.

The last line sums up. The exit status is 1 if a statement was false; the seeds that show it are listed, and each of
them shows it again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.simulation.checkers import Findings, false_confidences
from tests.simulation.world import Report, run_seed

MAX_SHOWN = 5


@dataclass(slots=True)
class Summary:
    """The sum of many reports."""

    seeds: int = 0
    records: int = 0
    cpu_s: float = 0.0
    virtual_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    findings: Findings = field(default_factory=Findings)
    false_seeds: list[int] = field(default_factory=list)

    def add(self, report: Report) -> None:
        self.seeds += 1
        self.records += report.records
        self.cpu_s += report.cpu_s
        self.virtual_s += report.virtual_s
        self.faults += report.faults
        self.findings.add(report.findings)
        if report.findings.false:
            self.false_seeds.append(report.seed)

    def lines(self) -> list[str]:
        kinds = Counter(f.kind for f in self.findings.false)
        faults = ", ".join(f"{fault} {n}" for fault, n in sorted(self.faults.items()))
        hours, cpu = self.virtual_s / 3600, self.cpu_s / max(self.seeds, 1)
        false = ", ".join(f"{kind} {n}" for kind, n in sorted(kinds.items())) or "none"
        return [
            f"faults: {faults}",
            f"seeds {self.seeds} ({cpu:.2f} s of CPU each, {hours:.1f} h virtual), records {self.records}, answers"
            f" {self.findings.answers}, cells {self.findings.cells}, statements of a confidence"
            f" {len(self.findings.outcomes)}, faults {self.faults.total()}, false: {false}"
            f" (seeds {self.false_seeds[:20] or 'none'})",
        ]


def summarize(reports: Iterable[Report]) -> Summary:
    """Sums up, and prints the false statements as they are found."""
    summary = Summary()
    for report in reports:
        summary.add(report)
        for falsehood in report.findings.false[:MAX_SHOWN]:
            print(f"seed {report.seed}: {falsehood}", flush=True)
        if summary.seeds % 500 == 0:
            print(f"… {summary.lines()[-1]}", flush=True)
    of_many = false_confidences(summary.findings.outcomes)
    summary.findings.false += of_many
    for falsehood in of_many:
        print(falsehood)
    return summary


def _seeds(text: str) -> range:
    first, _, last = text.partition("..")
    seeds = range(int(first), int(last)) if last else range(int(first))
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text} has no seed; expected A..B with B greater than A, such as 0..1000")
    return seeds


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=_seeds, default=range(100), metavar="A..B", help="from A, B excluded")
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--trace", action="store_true", help="print what happens")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    warnings.simplefilter("ignore", RuntimeWarning)  # overflow of drawn values is meant
    seeds = options.seeds if options.seed is None else range(options.seed, options.seed + 1)
    if options.jobs > 1 and not options.trace:
        with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
            summary = summarize(pool.imap_unordered(run_seed, seeds))
    else:
        summary = summarize(run_seed(seed, print if options.trace else None) for seed in seeds)
    print("\n".join(summary.lines()))
    return 1 if summary.findings.false else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of texts is a part of what a seed decides
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    sys.exit(main())

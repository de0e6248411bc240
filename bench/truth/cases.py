"""Cases, their tallies, and the rows of the table.

A part of the bench is a module with `cases()`, which `PARTS` in `bench.truth.__main__` names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

CONFIDENCES = (0.68, 0.95, 0.99)
STATES = ("cold", "steady", "after a change")
PATHS = ("estimator", "production cores", "processes")
BAND = 0.999
"""The band of a coverage: with this probability, intervals that hold exactly as often as stated are inside it. Of a
thousand such cells, chance puts one outside."""

State = Literal["cold", "steady", "after a change"]
Path = Literal["estimator", "production cores", "processes"]


@dataclass(slots=True)
class Tally:
    """Counts of one measure at one confidence.

    Attributes:
        trials: answers.
        stated: answers with at least one finite bound. Without one, the product states nothing.
        held: stated intervals that contain the true value.
    """

    trials: int = 0
    stated: int = 0
    held: int = 0

    def note(self, lower: float | None, upper: float | None, truth: float, slack: float = 0.0) -> None:
        """Counts an answer.

        Args:
            lower, upper: the bounds; None, NaN or infinite: unknown.
            slack: the rounding of the true value.
        """
        low = -math.inf if lower is None or math.isnan(lower) else lower
        high = math.inf if upper is None or math.isnan(upper) else upper
        self.trials += 1
        if math.isfinite(low) or math.isfinite(high):
            self.stated += 1
            self.held += low - slack <= truth <= high + slack


Tallies = dict[tuple[str, float], Tally]
"""By measure and confidence; a confidence of 1.0 is a certain bound."""


@dataclass(frozen=True, slots=True)
class Case:
    """Answers about one kind of data, of one or several measures.

    Attributes:
        name: for `--only` and progress.
        trials: number of trials, or of windows.
        smoke: the same for a smoke run, which leaves the case out if it is 0.
        run: makes that many trials with a seed, and counts.
        listed: measure -> page that lists its coverage, where it is below the band.
    """

    name: str
    data: str
    state: State
    path: Path
    run: Callable[[int, int], Tallies]
    trials: int = 1000
    smoke: int = 5
    listed: Mapping[str, str] = field(default_factory=dict)


@lru_cache(maxsize=4096)
def band(confidence: float, trials: int) -> tuple[float, float]:
    """Returns the band of a share: two quantiles of the binomial distribution, which are exact.

    If each interval holds with probability `confidence`, the share of intervals that hold is in the band with
    probability `BAND`.
    """
    if confidence >= 1 or not trials:
        return confidence, confidence
    tail, below, low, high = (1 - BAND) / 2, 0.0, None, trials
    for hits in range(trials + 1):
        choose = math.lgamma(trials + 1) - math.lgamma(hits + 1) - math.lgamma(trials - hits + 1)
        below += math.exp(choose + hits * math.log(confidence) + (trials - hits) * math.log1p(-confidence))
        if low is None and below > tail:
            low = hits
        if below >= 1 - tail:
            high = hits
            break
    return (low or 0) / trials, high / trials


def rows(case: Case, tallies: Tallies) -> list[dict[str, Any]]:
    """Returns a row per measure and confidence.

    `coverage` is the share of `trials` that hold, where `trials` are the stated intervals; null: none was stated.
    `unstated` is the number of answers without bounds.
    """
    result = []
    for (measure, confidence), tally in tallies.items():
        low, high = band(confidence, tally.stated)
        coverage = tally.held / tally.stated if tally.stated else None
        result.append(
            {
                "measure": measure,
                "data": case.data,
                "state": case.state,
                "path": case.path,
                "confidence": confidence,
                "coverage": coverage,
                "band": [low, high],
                "trials": tally.stated,
                "unstated": tally.trials - tally.stated,
                "listed": case.listed.get(measure, ""),
            }
        )
    return result


def is_below(row: Mapping[str, Any]) -> bool:
    """Returns whether a row's coverage is below its band."""
    return row["coverage"] is not None and row["coverage"] < row["band"][0] - 1e-12


def is_fault(row: Mapping[str, Any]) -> bool:
    """Returns whether a row's coverage is below its band and no page lists it."""
    return is_below(row) and not row["listed"]


def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns what identifies a row."""
    return tuple(row[name] for name in ("measure", "data", "state", "path", "confidence"))

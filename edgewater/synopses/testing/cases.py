"""Test cases: one law, one subject, one data set; and the number of intervals that must contain the true value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from edgewater.synopses.testing import algebra, contract
from edgewater.synopses.testing.subject import Subject

ALARM = 100_000  # limit: false alarms of a test, one in so many
"""Tests have fixed seeds, so they always pass or always fail. Suppose that intervals contain the true value exactly as
often as they claim. Then a test with `least_hits` fails for one in `ALARM` of all seeds."""


@dataclass(frozen=True)
class Case:
    """One law, one subject, and one of its data sets if the law needs data."""

    law: Callable[..., None]
    subject: Subject
    data: str | None = None

    def __str__(self) -> str:
        names = (self.law.__name__, self.subject.name, self.data)
        return "-".join(name for name in names if name is not None)

    def check(self) -> None:
        """Raises AssertionError if the subject breaks the law."""
        arguments: tuple[Any, ...] = () if self.data is None else (self.subject.zoo()[self.data],)
        try:
            self.law(self.subject, *arguments)
        except Exception as exc:
            exc.add_note(f"the law: {self.law.__name__.replace('_', ' ')}; {self.subject.name}, data {self.data}")
            raise


def cases(subjects: Iterable[Subject]) -> list[Case]:
    """Returns every law for every subject and data set: a few hundred per subject, some milliseconds each."""
    result = []
    for subject in subjects:
        result += [Case(law, subject, data) for law in algebra.LAWS for data in subject.zoo()]
        result += [Case(law, subject) for law in contract.LAWS]
    return result


def least_hits(trials: int, confidence: float) -> int:
    """Returns the largest h with P(Binomial(trials, confidence) < h) < 1/ALARM."""
    if confidence >= 1:
        return trials
    below = 0.0
    for hits in range(trials + 1):
        below += math.exp(
            math.lgamma(trials + 1)
            - math.lgamma(hits + 1)
            - math.lgamma(trials - hits + 1)
            + hits * math.log(confidence)
            + (trials - hits) * math.log1p(-confidence)
        )
        if below >= 1 / ALARM:
            return hits
    return trials

"""The battery: what every stack must hold, as checks that run on your own. NumPy only; any test runner.

    import pytest
    from edgewater.synopses.testing import Case, Subject, cases

    SUBJECTS = [Subject("tally(int64)", TallyStack, "int64")]

    @pytest.mark.parametrize("case", cases(SUBJECTS), ids=str)
    def test_a_tally_holds_what_it_claims(case: Case) -> None:
        case.check()

A check fails with AssertionError. `least_hits` is for tests of intervals. With pytest, put
``pytest.register_assert_rewrite("edgewater.synopses.testing")`` into `conftest.py` to see the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from edgewater.synopses.testing import algebra, contract
from edgewater.synopses.testing.coverage import ALARM, least_hits
from edgewater.synopses.testing.subject import Subject

__all__ = ["ALARM", "Case", "Subject", "cases", "least_hits"]


@dataclass(frozen=True)
class Case:
    """One law, one subject, and one of its data sets if the law is about data."""

    law: Callable[..., None]
    subject: Subject
    data: str | None = None

    def __str__(self) -> str:
        parts = (self.law.__name__, self.subject.name, self.data)
        return "-".join(p for p in parts if p is not None)

    def check(self) -> None:
        """Raises AssertionError if the subject breaks the law."""
        given: tuple[Any, ...] = () if self.data is None else (self.subject.zoo()[self.data],)
        try:
            self.law(self.subject, *given)
        except Exception as exc:
            exc.add_note(f"the law: {self.law.__name__.replace('_', ' ')}; {self.subject.name}, data {self.data}")
            raise


def cases(subjects: Iterable[Subject]) -> list[Case]:
    """Every law for every subject and data set: a few hundred per subject, some milliseconds each."""
    result = []
    for subject in subjects:
        result += [Case(law, subject, data) for law in algebra.LAWS for data in subject.zoo()]
        result += [Case(law, subject) for law in contract.LAWS]
    return result

"""Each cause of a deviation has a rule, and what follows from a deviation obeys it."""

from __future__ import annotations

import pytest

from edgewater.answers import NONE, RULES, UNKNOWN, Amount, Cause, Deviation, Facts, LateRecords
from edgewater.answers.statement import violations_of_facts
from edgewater.answers.uniting import late_deviations
from edgewater.model.query import QuerySpec
from edgewater.wire import GUESSES, REJECTIONS

SPEC = QuerySpec.from_mapping({"name": "q", "from": "s", "measures": {"n": "count()"}, "window": {"tumbling": "1s"}})


def test_every_cause_has_a_rule() -> None:
    assert set(RULES) == set(Cause)
    for rule in RULES.values():
        assert rule.what and rule.lacks and rule.extra and rule.ends


@pytest.mark.parametrize("cause", [c for c in Cause if c is not Cause.UNANSWERED])  # that one is of a union
def test_every_cause_is_a_violation_with_its_code(cause: Cause) -> None:
    few_windows = 0.5 if cause is Cause.MAY_CHANGE else 1.0
    deviation = Deviation(cause, "b", reason="a reason", lacks=Amount(1, 1), confidence=few_windows)
    facts = Facts(2, 2, 1.0, deviations=(deviation,))
    assert cause in [violation.code for violation in violations_of_facts(facts, SPEC)]
    assert facts.lacks_records


@pytest.mark.parametrize("reason", ["after-final", "too-late", *REJECTIONS, *GUESSES])
def test_late_records_deviate_as_the_rule_of_their_cause_says(reason: str) -> None:
    (deviation,) = late_deviations({reason: LateRecords(3)})
    cause = Cause.REJECTED if reason in REJECTIONS else Cause.GUESSED if reason in GUESSES else Cause.AFTER_FINAL
    assert (deviation.cause, deviation.reason) == (cause, reason)
    adds = reason in GUESSES and GUESSES[reason].adds
    assert deviation.records == 3, "as counted; a rejected element may have been several records"
    lacks = Amount(3, 3) if cause is Cause.AFTER_FINAL else UNKNOWN
    assert deviation.lacks == (NONE if adds and not GUESSES[reason].may_lack else lacks)
    assert deviation.extra == (UNKNOWN if adds else NONE)
    assert RULES[cause].predicted is False, "no answer will have the records"


def test_amounts_add_up_and_an_unknown_one_stays_unknown() -> None:
    assert Amount(1, 2) + Amount(0, 3) == Amount(1, 5)
    assert Amount(1, 2) + UNKNOWN == Amount(1, None) and NONE + NONE == NONE

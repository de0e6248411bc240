"""The reference of causes is what the code applies."""

from edgewater.answers import RULES, Cause
from tests.docs.causes_reference import PAGE, render


def test_the_reference_has_the_rule_of_every_cause() -> None:
    assert set(RULES) == set(Cause)
    assert PAGE.read_text() == render(), "python -m tests.docs.causes_reference renews the page"

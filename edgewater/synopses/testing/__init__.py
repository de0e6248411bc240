"""The conformance tests of stacks: laws that every stack must satisfy. They need only NumPy and any test runner.

Authors of third-party synopses run them on their own; the product never imports this package.

    import pytest
    from edgewater.synopses.testing import Case, Subject, cases

    SUBJECTS = [Subject("tally(int64)", TallyStack, "int64")]

    @pytest.mark.parametrize("case", cases(SUBJECTS), ids=str)
    def test_a_tally_holds_what_it_claims(case: Case) -> None:
        case.check()

A check fails with AssertionError. `least_hits` is for tests of intervals. With pytest, put
``pytest.register_assert_rewrite("edgewater.synopses.testing")`` into `conftest.py` to see the values.
"""

from edgewater.synopses.testing.cases import ALARM, Case, cases, least_hits
from edgewater.synopses.testing.subject import Subject

__all__ = ["ALARM", "Case", "Subject", "cases", "least_hits"]

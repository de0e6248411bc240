"""Comparisons of intervals that are decided, and those that raise."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewater.client import Interval, Undecided
from tests.examples import examples

EXACT = Interval(4, 4, 4, 1.0)
WIDE = Interval(4, 2, 6, 0.95)
UNKNOWN = Interval(4, 4, None, 1.0)
NOTHING = Interval(None, None, None)


def test_only_an_interval_of_one_value_is_a_number():
    assert (float(EXACT), int(EXACT)) == (4.0, 4)
    for interval in (WIDE, UNKNOWN, NOTHING):
        with pytest.raises(Undecided):
            float(interval)
    with pytest.raises(Undecided):
        int(Interval(0.5, 0.5, 0.5))


@pytest.mark.parametrize(
    ("compare", "expected"),
    [
        (lambda: WIDE < 7, True),
        (lambda: WIDE < 2, False),
        (lambda: WIDE <= 6, True),
        (lambda: WIDE > 1, True),
        (lambda: WIDE > 6, False),
        (lambda: WIDE >= 2, True),
        (lambda: WIDE >= 6.5, False),
        (lambda: Interval(9, 7, 11) > WIDE, True),
        (lambda: UNKNOWN >= 4, True),
        (lambda: UNKNOWN < 4, False),
        (lambda: EXACT == 4, True),
        (lambda: EXACT != 4, False),
        (lambda: WIDE == 7, False),
        (lambda: Interval(9, 7, 11) == WIDE, False),
        (lambda: WIDE is None or WIDE == None, False),  # noqa: E711
        (lambda: EXACT > 3, True),
    ],
)
def test_a_comparison_that_the_bounds_decide(compare, expected):
    assert compare() is expected


@pytest.mark.parametrize(
    "compare",
    [
        lambda: WIDE < 3,
        lambda: WIDE < 6,
        lambda: Interval(4, 2, 6) < WIDE,
        lambda: WIDE == 4,
        lambda: Interval(4, 2, 6) == WIDE,
        lambda: UNKNOWN > 5,
        lambda: NOTHING < 5,
        lambda: sorted([WIDE, Interval(5, 3, 7)]),
        lambda: max(WIDE, Interval(5, 3, 7)),
    ],
)
def test_a_comparison_that_the_bounds_do_not_decide_raises(compare):
    with pytest.raises(Undecided):
        compare()


def test_an_interval_has_no_truth_value_and_no_hash():
    with pytest.raises(TypeError, match="compare it"):
        bool(WIDE)
    with pytest.raises(TypeError, match="unhashable"):
        hash(WIDE)
    with pytest.raises(TypeError, match="numbers and intervals"):
        _ = WIDE < "5"


def test_its_text_shows_what_is_unknown():
    assert [str(i) for i in (EXACT, WIDE, UNKNOWN, NOTHING)] == ["4", "4 [2, 6]", "4 [4, ?]", "? [?, ?]"]
    assert UNKNOWN.width == math.inf


BOUNDED = st.tuples(*[st.integers(-5, 5)] * 2).map(lambda b: Interval(min(b), min(b), max(b)))


@examples(40)
@given(BOUNDED, BOUNDED)
def test_what_a_comparison_says_holds_for_every_pair_of_values(a, b):
    pairs = [(x, y) for x in range(a.lower, a.upper + 1) for y in range(b.lower, b.upper + 1)]
    for compare in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"):
        truths = {getattr(x, compare)(y) for x, y in pairs}
        if len(truths) == 1:
            assert getattr(a, compare)(b) is truths.pop()
        else:
            with pytest.raises(Undecided):
                getattr(a, compare)(b)

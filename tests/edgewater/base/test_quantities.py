from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewater.base.errors import InvalidConfig, InvalidInput, InvalidQuery
from edgewater.base.quantities import MAX_DURATION_MS, duration_ms, format_duration, fraction, require_keys, size_bytes
from tests.refusals import refused


@pytest.mark.parametrize(
    ("text", "millis"),
    [("500ms", 500), ("30s", 30_000), ("5m", 300_000), ("1h30m", 5_400_000), ("1d", 86_400_000), ("1w", 604_800_000),
     ("1.5s", 1500), ("0.001s", 1), ("1000us", 1), ("0s", 0), (" 5s ", 5000), ("+5s", 5000), (".5s", 500)],
)  # fmt: skip
def test_durations_are_whole_milliseconds(text: str, millis: int) -> None:
    assert duration_ms(text, "lateness") == millis


@given(st.integers(0, MAX_DURATION_MS))
def test_a_formatted_duration_is_read_back(millis: int) -> None:
    assert duration_ms(format_duration(millis), "lateness") == millis


def test_durations_are_formatted_in_their_largest_unit() -> None:
    shown = [format_duration(ms) for ms in (0, 1, 1500, 60_000, 5_400_000, 86_400_000, 604_800_000)]
    assert shown == ["0ms", "1ms", "1500ms", "1m", "90m", "1d", "1w"]


@pytest.mark.parametrize(
    "value",
    [
        5,
        1.5,
        None,
        True,
        ["5s"],
        "5",
        "",
        "5 s",
        "5 parsecs",
        "--5s",
        "1us",
        "1ns",
        "1500us",
        "-5s",
        "36525d1ms",
        "9999999w",
        "99999999999999w",
    ],
)
def test_a_bad_duration_names_field_value_and_what_is_accepted(value: Any) -> None:
    with refused(InvalidQuery, "budget.staleness", value):
        duration_ms(value, "budget.staleness", InvalidQuery)


def test_a_duration_below_the_minimum_is_refused() -> None:
    assert duration_ms("1ms", "x", minimum_ms=1) == 1
    with refused(InvalidInput, "x"):
        duration_ms("0s", "x", minimum_ms=1)


@given(st.text(max_size=12) | st.text("0123456789.+-hmsdwunµ ", max_size=12))
def test_any_text_is_a_duration_or_refused(text: str) -> None:
    try:
        assert duration_ms(text, "x") >= 0
    except InvalidInput as error:
        assert error.field == "x" and error.accepted


@pytest.mark.parametrize(
    ("value", "size"),
    [(200, 200), ("200", 200), ("64KiB", 65_536), ("1MB", 10**6), ("1.5MB", 1_500_000), (0, 0), (3.0, 3)],
)
def test_sizes_are_bytes(value: Any, size: int) -> None:
    assert size_bytes(value, "cap") == size


NO_SIZES = ["", "1XB", "MB", "1.5", "0.5", 2.7, -1, "-1", "-1MB", True, None, [1], "nan", float("nan"), float("inf")]


@pytest.mark.parametrize("value", NO_SIZES)
def test_a_bad_size_names_field_value_and_what_is_accepted(value: Any) -> None:
    with refused(InvalidConfig, "center.bandwidth"):
        size_bytes(value, "center.bandwidth", InvalidConfig)


@given(st.text(max_size=8) | st.text("0123456789.KMGiB e-", max_size=8))
def test_any_text_is_a_size_or_refused(text: str) -> None:
    try:
        assert size_bytes(text, "x") >= 0
    except InvalidInput as error:
        assert error.field == "x"


def test_percentages() -> None:
    assert [fraction(v) for v in ("5%", " 5 %", "0.1%", "500%")] == [0.05, 0.05, 0.001, 5.0]
    assert [fraction(v) for v in ("5", 5, None, "%", "x%", "nan%", "inf%")] == [None] * 7


def test_keys_are_required_and_known() -> None:
    allowed = {"a": True, "b": False}
    assert require_keys({"a": 1}, "at", allowed, InvalidInput) == {"a": 1}
    assert require_keys({"a": None, "b": 2}, "at", allowed, InvalidInput) == {"a": None, "b": 2}
    with refused(InvalidInput, "at.c"):
        require_keys({"a": 1, "c": 3}, "at", allowed, InvalidInput)
    with refused(InvalidInput, "at.a"):
        require_keys({"b": 1}, "at", allowed, InvalidInput)
    with refused(InvalidInput, "a"):
        require_keys({}, "", allowed, InvalidInput)
    for given_ in (None, [1], "a", 3):
        with refused(InvalidInput, "at"):
            require_keys(given_, "at", allowed, InvalidInput)

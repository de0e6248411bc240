"""A forecast is yes or no only if that holds whatever is not known of the link."""

from __future__ import annotations

from typing import Any

import pytest

from edgewater.model.link_forecast import Load, Verdict, together, verdict
from edgewater.model.query import QuerySpec


def load(sent: float, omitted: float = 0.0, delay_ms: float = 100.0, **parts: Any) -> Load:
    query: dict[str, Any] = {
        "name": "q", "from": "s", "group_by": ["k"], "measures": {"n": "count()"}, "window": {"tumbling": "10s"},
    }  # fmt: skip
    return Load.of(QuerySpec.from_mapping(query | parts), (sent, omitted), delay_ms)


TIMELY: dict[str, Any] = {"budget": {"staleness": "2s"}}


@pytest.mark.parametrize(
    ("own", "others", "low", "high", "expected"),
    [
        (load(1_000, **TIMELY), [], 4_000, 5_000, "yes"),
        (load(6_500, **TIMELY), [], 4_000, 5_000, "unknown"),  # within a quarter of what arrives in 1.9 s
        (load(70_000, **TIMELY), [], 4_000, 5_000, "no"),  # more than fits into window and budget together
        (load(1_000, 50, **TIMELY), [], 4_000, 5_000, "no"),
        (load(100, delay_ms=2_000, **TIMELY), [], 4_000, 5_000, "no"),  # the path alone takes the budget
        (load(1_000, **TIMELY), [], 0, 0, "unknown"),
        (load(100, delay_ms=2_000, **TIMELY), [], 0, 0, "no"),
        (load(1_000, **TIMELY), [load(6_000, **TIMELY)], 4_000, 5_000, "unknown"),
        (load(1_000, **TIMELY), [load(20_000)], 4_000, 5_000, "yes"),  # an exact query is due later
        (load(1_000, **TIMELY), [load(60_000)], 4_000, 5_000, "unknown"),  # the link is full
        (load(20_000), [], 4_000, 5_000, "yes"),
        (load(20_000), [load(2_000, window={"tumbling": "2s"})], 4_000, 5_000, "yes"),
        (load(20_000), [load(4_000, window={"tumbling": "2s"})], 4_000, 5_000, "unknown"),
        (load(200_000), [], 4_000, 5_000, "no"),
    ],
)
def test_a_verdict_holds_whatever_is_not_known(
    own: Load, others: list[Load], low: float, high: float, expected: Verdict
) -> None:
    assert verdict(own, [own, *others], low, high) == expected


def test_of_several_edges_one_decides_that_it_is_late_and_all_that_it_is_in_time() -> None:
    assert [together(v) for v in (("yes", "yes"), ("yes", "unknown"), ("no", "unknown"), ())] == [
        "yes", "unknown", "no", "unknown",
    ]  # fmt: skip

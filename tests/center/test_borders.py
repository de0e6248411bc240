"""What an answer says at the border of what the center can know: states lost, records that come too late."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.center.border_world import MINUTE, T0, Border


@pytest.fixture
def center(tmp_path: Path) -> Border:
    return Border(tmp_path)


# An edge that has lost its state


def test_a_window_over_which_an_edge_lost_its_state_is_not_complete(center: Border) -> None:
    edge = center.edge("a")
    center.register(measures={"n": "count()", "s": "sum(x)"})
    center.now_ms = T0 + 10_000
    edge.accept(*[T0 + 5_000] * 100)
    # kill -9, and the state directory is gone.
    center.now_ms = T0 + 20_000
    again = center.edge("a", "i2")
    center.now_ms = T0 + 2 * MINUTE + 1
    again.accept(*[T0 + 30_000] * 50, T0 + MINUTE + 10, T0 + 2 * MINUTE)
    again.ship()
    answer = center.answer()
    assert (answer["phase"], answer["data"][0]["n"]["estimate"]) == ("final", 50)
    assert answer["quality"]["completeness"] == {
        "ratio": 0.0, "expected": 1, "reported": 0, "missing": ["a"], "lost_state": ["a"],
    }  # fmt: skip
    assert answer["quality"]["records"]["expected"] is None
    assert answer["contract"]["met"] is False
    assert [v["code"] for v in answer["contract"]["violations"]] == ["missing-edges", "lost-state"]
    for measure in ("n", "s"):
        cell = answer["data"][0][measure]
        assert (cell["lower"], cell["upper"]) == (None, None), "records may be missing, or counted twice"
    (alarm,) = center.get("/v1/alarms")["alarms"]
    assert (alarm["kind"], alarm["edge"]) == ("state-lost", "a")
    later = center.answer(T0 + MINUTE)
    assert later["quality"]["completeness"]["missing"] == [], "the window began after the loss"
    assert later["contract"]["met"] is True
    assert later["data"][0]["n"]["upper"] == 1


def test_the_loss_is_known_after_a_restart_of_the_job(center: Border) -> None:
    edge = center.edge("a")
    center.register()
    edge.accept(T0)
    center.edge("a", "i2")
    center.open_job()
    center.now_ms = T0 + MINUTE
    center.edges["a"].accept(T0 + 30_000, T0 + MINUTE)
    center.edges["a"].ship()
    assert center.answer()["quality"]["completeness"]["lost_state"] == ["a"]


def test_an_edge_that_restarts_with_its_state_loses_nothing(center: Border) -> None:
    edge = center.edge("a")
    center.register()
    edge.accept(T0 + 5_000, T0 + 6_000)
    edge.durable.close()
    again = center.edge("a")
    center.now_ms = T0 + MINUTE
    again.accept(T0 + MINUTE)
    again.ship()
    answer = center.answer()
    assert (answer["data"][0]["n"]["upper"], answer["contract"]["met"]) == (2, True)
    assert "lost_state" not in answer["quality"]["completeness"]
    assert center.get("/v1/alarms")["alarms"] == []

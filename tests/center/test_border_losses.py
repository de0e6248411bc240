"""What an edge states of lost input is in every answer to the windows that may lack it, in every format."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.core import InputLost, MemoryAction, MemoryLimited
from edgewater.base.streams import EdgeId
from tests.center.border_world import MINUTE, SOURCE, STREAM, T0, Border


@pytest.fixture
def center(tmp_path: Path) -> Border:
    return Border(tmp_path)


def test_an_answer_that_may_lack_input_says_so_in_json(center: Border) -> None:
    edge = center.edge("a")
    center.register(measures={"n": "count()", "s": "sum(x)"}, lateness="2m")
    center.now_ms = T0 + 30_000
    edge.accept(T0 + 10_000)
    edge.durable.handle(InputLost(STREAM, SOURCE, "restart", center.now_ms))
    edge.accept(*[T0 + 20_000] * 2)
    center.now_ms = T0 + 2 * MINUTE
    edge.accept(T0 + MINUTE, T0 + 2 * MINUTE)
    edge.ship()
    first, second = center.answer(), center.answer(T0 + MINUTE)
    assert (first["phase"], second["phase"]) == ("early", "complete")
    (loss,) = first["quality"]["completeness"]["losses"]
    assert (loss["edge"], loss["source"], loss["reason"], loss["records"]) == ("a", SOURCE, "restart", None)
    assert first["quality"]["completeness"]["missing"] == ["a"]
    assert {v["code"] for v in first["contract"]["violations"]} == {"missing-edges", "input-lost"}
    count, total = first["data"][0]["n"], first["data"][0]["s"]
    assert (count["estimate"], count["lower"], count["upper"]) == (3, 3, None), "lost records can only raise it"
    assert (total["lower"], total["upper"]) == (None, None)
    assert "losses" not in second["quality"]["completeness"] and second["contract"]["met"]
    center.now_ms = T0 + 5 * MINUTE
    edge.accept(T0 + 4 * MINUTE)
    edge.ship()
    final = center.answer()
    assert (final["phase"], final["quality"]["completeness"]["losses"]) == ("final", [loss])


def test_a_window_whose_only_records_were_lost_has_an_answer(center: Border) -> None:
    edge = center.edge("a")
    center.register()
    center.now_ms = T0 + 30_000
    edge.accept(T0 - 1)
    center.now_ms = T0 + 3 * MINUTE
    edge.durable.handle(InputLost(STREAM, SOURCE, "file-gone", center.now_ms))
    edge.accept(T0 + 3 * MINUTE + 10)
    edge.ship()
    answer = center.answer(T0 + MINUTE)
    assert (answer["phase"], answer["quality"]["completeness"]["missing"]) == ("final", ["a"])
    assert answer["contract"]["met"] is False


def test_a_window_of_a_query_that_lacks_memory_at_an_edge_says_so_and_the_next_one_does_not(center: Border) -> None:
    full, other = center.edge("a"), center.edge("b")
    ref = center.register(measures={"n": "count()"}, group_by=["x"])
    center.now_ms = T0 + 30_000
    full.accept(T0 + 1_000)
    full.durable.handle(MemoryLimited(ref, MemoryAction.SUSPEND))
    full.accept(T0 + 2_000)
    center.now_ms = T0 + 3 * MINUTE
    for edge in (full, other):
        edge.accept(T0 + MINUTE, T0 + 2 * MINUTE)
        edge.ship()
    first, second = center.answer(), center.answer(T0 + MINUTE)
    (loss,) = first["quality"]["completeness"]["losses"]
    assert (loss["edge"], loss["reason"]) == ("a", "query-memory")
    assert [row["n"]["estimate"] for row in first["data"]] == [1] and not first["contract"]["met"]
    assert second["quality"]["completeness"]["ratio"] == 1.0 and second["contract"]["met"]
    assert center.get("/v1/queries/q")["alarms"] == []
    center.catalog.alarms.add("query-memory", "edge a does not", EdgeId("a"), 1, f"{ref.name}@{ref.version}")
    center.catalog.alarms.add("query-memory", "edge a does not", EdgeId("a"), 1, f"{ref.name}@{ref.version}1")
    (alarm,) = center.get("/v1/queries/q")["alarms"]
    assert alarm["kind"] == "query-memory"

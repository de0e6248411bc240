"""What an edge states of lost input is in every answer to the windows that may lack it, in every format.

A fault of one edge costs only the bounds of the groups that the edge may have records of (`constants`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edge.core.events import InputLost, MemoryLimited
from edge.core.memory import MemoryAction
from edge.records import RejectionReason
from edgewater.base.streams import EdgeId
from edgewater.wire import REJECTIONS
from tests.center.border_world import MINUTE, SOURCE, STREAM, T0, Border


@pytest.fixture
def center(tmp_path: Path) -> Border:
    return Border(tmp_path)


def test_an_answer_that_may_lack_input_says_so_in_json(center: Border) -> None:
    edge = center.edge_with_query("a", measures={"n": "count()", "s": "sum(x)"}, lateness="2m")
    center.now_ms = T0 + 30_000
    edge.accept(T0 + 10_000)
    edge.durable.handle(InputLost(STREAM, SOURCE, "restart", center.now_ms))
    edge.accept(*[T0 + 20_000] * 2)
    center.now_ms = T0 + 2 * MINUTE
    edge.deliver(T0 + MINUTE, T0 + 2 * MINUTE)
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
    edge.deliver(T0 + 4 * MINUTE)
    final = center.answer()
    assert (final["phase"], final["quality"]["completeness"]["losses"]) == ("final", [loss])


def test_a_window_whose_only_records_were_lost_has_an_answer(center: Border) -> None:
    edge = center.edge_with_query("a")
    center.now_ms = T0 + 30_000
    edge.accept(T0 - 1)
    center.now_ms = T0 + 3 * MINUTE
    edge.durable.handle(InputLost(STREAM, SOURCE, "file-gone", center.now_ms))
    edge.deliver(T0 + 3 * MINUTE + 10)
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
        edge.deliver(T0 + MINUTE, T0 + 2 * MINUTE)
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


MEASURES = {"n": "count()", "s": "sum(x)", "d": "distinct(event_time_ms)"}


def three_sites(center: Border, **parts: object) -> list[Any]:
    """Edges at the sites 1, 2 and 3, which is the value of the column x in all their records."""
    sites = [center.edge(name, constants={"x": number}) for number, name in enumerate("abc", 1)]
    center.register(measures=MEASURES, group_by=["x"], **parts)
    center.now_ms = T0 + 30_000
    for site in sites:
        site.accept(T0 + 10_000, T0 + 20_000)
    return sites


def finish(center: Border, *sites: Any) -> None:
    center.now_ms = T0 + 2 * MINUTE
    for site in sites:
        site.deliver(T0 + 2 * MINUTE)


def bounds(answer: Any) -> dict[int, list[Any]]:
    return {row["group"]["x"]: [row[m][side] for m in ("n", "s") for side in ("lower", "upper")]
            for row in answer["data"]}  # fmt: skip


def test_lost_input_of_one_site_leaves_the_bounds_of_the_others(center: Border) -> None:
    sites = three_sites(center)
    sites[0].durable.handle(InputLost(STREAM, SOURCE, "file-truncated", center.now_ms))
    finish(center, *sites)
    answer = center.answer()
    assert bounds(answer) == {1: [2, None, None, None], 2: [2, 2, 4, 4], 3: [2, 2, 6, 6]}
    distinct = {row["group"]["x"]: row["d"] for row in answer["data"]}
    assert distinct[1]["upper"] is None and distinct[2]["upper"] is not None
    completeness = answer["quality"]["completeness"]
    assert (completeness["missing"], completeness["only"]) == (["a"], {"a": {"x": 1}})
    assert {v["code"] for v in answer["contract"]["violations"]} == {"missing-edges", "input-lost"}
    assert answer["quality"]["error"]["missing"]["n"] is None
    header, *lines = center.fetch(f"/v1/queries/q/windows/{T0}", "text/csv").text.splitlines()
    at = header.replace('"', "").split(",").index("n_upper")
    assert [line.split(",")[at] for line in lines] == ["", "2", "2"]


def test_an_edge_that_is_down_costs_the_bounds_of_its_own_groups_only(center: Border) -> None:
    sites = three_sites(center, budget={"staleness": "10s"})
    finish(center, *sites[:2])
    center.now_ms = T0 + 3 * MINUTE
    center.writer.advance()
    answer = center.answer()
    assert answer["phase"] == "early"
    assert bounds(answer) == {1: [2, 2, 2, 2], 2: [2, 2, 4, 4]}, "nothing of the third site has come"
    assert answer["quality"]["completeness"]["only"] == {"c": {"x": 3}}
    center.open_job()  # what the ledger knows of constants is in its store
    finish(center, sites[2])
    assert bounds(center.answer()) == {1: [2, 2, 2, 2], 2: [2, 2, 4, 4], 3: [2, 2, 6, 6]}


def test_an_edge_without_a_constant_may_have_records_of_any_group(center: Border) -> None:
    sites = [*three_sites(center), center.edge("d")]
    sites[3].durable.handle(InputLost(STREAM, SOURCE, "file-truncated", center.now_ms))
    sites[0].durable.handle(InputLost(STREAM, SOURCE, "file-truncated", center.now_ms))
    finish(center, *sites)
    answer = center.answer()
    assert {n_upper for _, n_upper, _, _ in bounds(answer).values()} == {None}
    assert answer["quality"]["completeness"]["only"] == {"a": {"x": 1}}


def test_a_constant_that_is_no_group_column_does_not_limit_a_fault(center: Border) -> None:
    sites = [center.edge(name, constants={"x": number}) for number, name in enumerate("ab", 1)]
    center.register(measures={"n": "count()"})
    sites[0].accept(T0 + 10_000)
    sites[0].durable.handle(InputLost(STREAM, SOURCE, "file-truncated", center.now_ms))
    finish(center, *sites)
    answer = center.answer()
    assert [row["n"]["upper"] for row in answer["data"]] == [None]
    assert "only" not in json.dumps(answer["quality"]["completeness"])


def test_each_reason_for_which_a_decoder_rejects_a_record_reaches_the_center() -> None:
    of_files = {"truncated", "corrupt", "file-truncated", "file-gone"}
    assert {reason.value for reason in RejectionReason} - of_files == set(REJECTIONS)

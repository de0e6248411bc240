"""A fault of one edge costs only the bounds of the groups that the edge may have records of (`constants`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edge.core import InputLost
from edge.records import RejectionReason
from edgewater.wire import REJECTIONS
from tests.center.border_world import MINUTE, SOURCE, STREAM, T0, Border

MEASURES = {"n": "count()", "s": "sum(x)", "d": "distinct(event_time_ms)"}


@pytest.fixture
def center(tmp_path: Path) -> Border:
    return Border(tmp_path)


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
        site.accept(T0 + 2 * MINUTE)
        site.ship()


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

"""Windows of which nothing has come: the answer says so in every form, and claims no number of records."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest

from center.api.answer_cache import ARROW_METADATA
from edgewater.model.table_texts import ARROW, CSV
from tests.center.border_world import MINUTE, T0, Border

UNKNOWN = {"estimate": None, "lower": None, "upper": None}
MEASURES = {"n": "count()", "s": "sum(x)", "most": "max(x)", "avg": "mean(x)", "d": "distinct(x)"}


def silent_world(path: Path, **parts: object) -> Border:
    """Two edges from which nothing of the first window comes before its deadline."""
    center = Border(path)
    for name in ("a", "b"):
        center.edge(name)
    center.register(budget={"staleness": "2s"}, **{"measures": MEASURES, **parts})
    center.now_ms = T0 + MINUTE + 1_900
    center.writer.advance()
    return center


def fetched(center: Border, form: str) -> httpx.Response:
    path = f"/v1/queries/q/windows?start={T0}&end={T0 + MINUTE}"
    response = center.fetch(path, accept=form)
    assert response.status_code == 200, response.text
    return response


def rows_of(center: Border, form: str) -> list[dict[str, Any]]:
    content = fetched(center, form).content
    if form == ARROW:
        table = pa.ipc.open_stream(content).read_all()
        return [{name: row[name] for name in table.column_names} for row in table.to_pylist()]
    return [{k: v or None for k, v in row.items()} for row in csv.DictReader(io.StringIO(content.decode()))]


@pytest.mark.parametrize("form", [CSV, ARROW])
@pytest.mark.parametrize("group_by", [[], ["x"]], ids=["global", "groups"])
def test_a_window_of_which_nothing_came_is_a_row_that_says_so(tmp_path: Path, group_by: list[str], form: str) -> None:
    (row,) = rows_of(silent_world(tmp_path, group_by=group_by), form)
    assert (row["phase"], str(row["revision"]), float(row["completeness"])) == ("early", "1", 0.0)
    assert row["contract"] == "missing-edges; nothing-arrived"
    assert row["n_upper"] is None and row["d_upper"] is None and row["s_lower"] is row["s_upper"] is row["avg"] is None
    if group_by:
        assert row["x"] is None and row["n"] is row["n_lower"] is None


def test_the_metadata_of_arrow_has_the_whole_statement(tmp_path: Path) -> None:
    center = silent_world(tmp_path, group_by=["x"])
    schema = pa.ipc.open_stream(fetched(center, ARROW).content).schema
    (stated,) = json.loads(schema.metadata[ARROW_METADATA])
    answer = center.answer()
    assert stated == {"group_by": ["x"]} | {name: value for name, value in answer.items() if name != "data"}


def test_an_answer_without_groups_states_that_nothing_came(tmp_path: Path) -> None:
    answer = silent_world(tmp_path, group_by=["x"]).answer()
    assert (answer["data"], answer["confidence"]) == ([], None)
    assert answer["quality"]["records"]["expected"] is None and answer["contract"]["met"] is False
    missing, nothing = answer["contract"]["violations"]
    assert (missing["code"], nothing["code"]) == ("missing-edges", "nothing-arrived")
    assert nothing["message"].startswith("no record of the window has arrived from a, b; it is not known")


def test_the_count_of_a_window_of_which_nothing_came_is_not_zero_for_sure(tmp_path: Path) -> None:
    (row,) = silent_world(tmp_path).answer()["data"]
    assert row["n"] == {"estimate": 0, "lower": 0, "upper": None}
    for name in ("most", "avg"):
        assert row[name] == UNKNOWN
    for name in ("s", "d"):
        assert (row[name]["lower"], row[name]["upper"]) == (None, None)


@pytest.mark.slow
def test_confidence_is_null_beside_unknown_bounds(tmp_path: Path) -> None:
    center = silent_world(tmp_path, measures={"s": "sum(x)", "d": "distinct(x)"})
    assert center.answer()["confidence"] is None
    center.edges["a"].accept(T0 + 5_000, T0 + MINUTE + 10)
    center.now_ms += 2_000
    center.edges["a"].ship()
    partly = center.answer()
    assert partly["quality"]["records"]["observed"] == 1 and partly["contract"]["met"] is False
    assert partly["confidence"] is None and partly["data"][0]["s"]["upper"] is None
    center.edges["b"].accept(T0 + MINUTE + 10)
    center.edges["b"].ship()
    whole = center.answer()
    assert (whole["phase"], whole["contract"]["met"]) == ("final", True)
    assert whole["confidence"] is not None and whole["data"][0]["s"]["upper"] is not None


@pytest.mark.parametrize("restarts", [False, True], ids=["", "restarted"])
def test_a_window_that_all_edges_have_closed_without_a_record_is_known_to_be_empty(
    tmp_path: Path, restarts: bool
) -> None:
    center = silent_world(tmp_path)
    if restarts:
        center.open_job()
    for edge in center.edges.values():
        edge.deliver(T0 + MINUTE + 10)
    answer = center.answer()
    assert (answer["phase"], answer["contract"]["met"], answer["confidence"]) == ("final", True, 0.95)
    assert answer["data"][0]["n"] == {"estimate": 0, "lower": 0, "upper": 0}
    assert answer["quality"]["records"]["expected"] == 0
    (row,) = rows_of(center, CSV)
    assert (row["n"], row["contract"], float(row["completeness"])) == ("0", "met", 1.0)


def test_without_any_edge_the_count_is_unknown(tmp_path: Path) -> None:
    center = Border(tmp_path)
    center.edge("a")
    center.register(budget={"staleness": "2s"}, edges=["elsewhere"])
    center.now_ms = T0 + MINUTE + 1_900
    center.writer.advance()
    answer = center.answer()
    assert answer["data"][0]["n"]["upper"] is None and answer["contract"]["met"] is False
    assert "nothing-arrived" in [v["code"] for v in answer["contract"]["violations"]]


@pytest.mark.parametrize("group_by", [[], ["x"]], ids=["global", "groups"])
def test_an_accuracy_is_not_met_by_a_window_of_which_nothing_came(tmp_path: Path, group_by: list[str]) -> None:
    accuracy = {"error": "5%", "measure": "s", "substream": "3s"}
    answer = silent_world(tmp_path, group_by=group_by, accuracy=accuracy).answer()
    assert answer["contract"]["met"] is False
    assert [v["code"] for v in answer["contract"]["violations"]] == ["nothing-arrived", "accuracy"]
    for row in answer["data"]:
        assert (row["s"]["lower"], row["s"]["upper"]) == (None, None)

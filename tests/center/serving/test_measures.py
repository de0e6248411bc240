"""What an answer says of a measure of each kind, by itself and when it is asked."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from center.api.models import AnswerRow
from center.serving.measures import MeasureQuestions, require_possible
from edgewater.answers import WithheldBound
from edgewater.base.errors import InvalidRequest
from tests.center.measures_world import EVERY_FUNCTION, aggregate, record, records, spec
from tests.center.rendered import render, to_csv, to_table
from tests.refusals import refused

QUERY = spec(EVERY_FUNCTION)
DATA = records(4000)
SYNOPSIS = aggregate(QUERY, DATA).to_bytes()
IPS, MS = DATA.column("ip").to_numpy(), DATA.column("ms").to_numpy()


def row(
    questions: MeasureQuestions | None = None, query: Any = QUERY, synopsis: bytes | None = SYNOPSIS
) -> dict[str, Any]:
    given = record(query, synopsis)
    (data,) = render(given, query, questions or MeasureQuestions())["data"]
    json.dumps(data, allow_nan=False)
    AnswerRow.model_validate(data)
    return data


def holds(cell: dict[str, Any], truth: float) -> bool:
    return bool(cell["lower"] <= truth <= cell["upper"])


def test_each_kind_shows_its_main_result_without_questions() -> None:
    cells = row()
    n = len(IPS)
    exact = {"estimate": n, "lower": n, "upper": n}
    assert cells["n"] == cells["cm"] == exact
    assert [e["item"] for e in cells["top"]["top"]] == np.argsort(-np.bincount(IPS), kind="stable")[:3].tolist()
    assert all(holds(e, (e["item"] == IPS).sum()) for e in cells["top"]["top"])
    for name in ("bf", "cf"):
        assert holds(cells[name], len(np.unique(IPS))) and 0 <= cells[name]["false_positive_rate"] < 0.01
    assert 0 < cells["bf"]["fill"] < 0.5
    assert cells["ccf"]["count"] == exact and holds(cells["ccf"], len(np.unique(IPS)))
    assert holds(cells["join"], (np.bincount(IPS).astype(float) ** 2).sum())
    assert set(cells["smp"]) == {"mean", "sum", "count", "size"} and cells["smp"]["size"] == 50
    assert holds(cells["smp"]["mean"], MS.mean()) and holds(cells["smp"]["count"], n)
    assert set(cells["names"]) == {"count", "size"}, "strings have no mean"
    assert cells["new"]["mean"]["estimate"] == pytest.approx(MS[-10:].mean()) and cells["new"]["size"] == 10
    assert set(cells["bia"]) == {"mean", "size"}
    assert holds(cells["ber"]["sum"], MS.sum())
    assert cells["ew"]["count"] == exact
    assert [b["estimate"] for b in cells["ew"]["buckets"]] == np.histogram(MS, 4, (0, 100))[0].tolist()
    assert (cells["ew"]["below"], cells["ew"]["above"], cells["ew"]["nan"]) == (0, int((MS > 100).sum()), 0)
    assert [b["from"] for b in cells["ew"]["buckets"]] == [0, 25, 50, 75]
    boundaries = cells["ed"]["boundaries"]
    assert len(boundaries) == 5 and boundaries[2]["estimate"] == pytest.approx(np.median(MS), rel=0.02)
    assert set(cells["dd"]["quantiles"]) == set(cells["kl"]["quantiles"]) == {"0.5", "0.9", "0.95", "0.99"}


def test_items_are_read_in_the_type_of_the_argument() -> None:
    cells = row(MeasureQuestions(items=("0", "77777")))
    truth = int((IPS == 0).sum())
    for name in ("cm", "top", "ccf", "join"):
        zero, absent = cells[name]["items"]
        assert zero["item"] == 0 and holds(zero, truth), name
        assert absent["item"] == 77777
    assert [c["estimate"] for c in cells["bf"]["contains"]] == [1, 0]
    assert cells["n"] == {"estimate": 4000, "lower": 4000, "upper": 4000}, "who cannot answer says what it always says"
    texts = spec({"u": "count_min(url, width=64)", "b": "count_min(ok, width=64)", "f": "count_min(ms, width=64)"})
    synopsis = aggregate(texts, DATA).to_bytes()
    asked = row(MeasureQuestions(items=("/0",), measures=("u",)), texts, synopsis)
    assert asked["u"]["items"][0]["item"] == "/0" and asked["u"]["items"][0]["estimate"] >= 1000
    assert row(MeasureQuestions(items=("true",), measures=("b",)), texts, synopsis)["b"]["items"][0]["item"] is True
    assert row(MeasureQuestions(items=("1.5",), measures=("f",)), texts, synopsis)["f"]["items"][0]["item"] == 1.5


@pytest.mark.parametrize(("measure", "item"), [("cm", "ten"), ("cm", "1.5"), ("cm", str(10**400)), ("bf", "")])
def test_an_item_of_another_type_is_refused(measure: str, item: str) -> None:
    with refused(InvalidRequest, "item"):
        row(MeasureQuestions(items=(item,), measures=(measure,)))
    with refused(InvalidRequest, "contains"):
        row(MeasureQuestions(contains=(item,), measures=("bf",)))


def test_questions_are_evaluated_on_the_measures_that_answer_them() -> None:
    cells = row(MeasureQuestions(quantiles=(0.25,), ranks=(60.0,), ranges=((0.0, 50.0),), top=2, confidence=0.9999))
    inside = int((MS <= 50).sum())
    for name in ("ew", "ed"):
        assert holds(cells[name]["ranges"]["0:50"], inside), name
    assert holds(cells["smp"]["ranges"]["0:50"], inside)
    for name in ("smp", "ew", "ed", "dd", "kl", "ber"):
        assert holds(cells[name]["ranks"]["60"], (MS <= 60).mean()), name
        assert holds(cells[name]["quantiles"]["0.25"], np.quantile(MS, 0.25)), name
    assert len(cells["top"]["top"]) == 2


def test_numbers_that_differ_have_answers_of_their_own() -> None:
    ranks, quantiles = (1234567.0, 1234568.0, 0.5, -3.0), (0.9999999, 1.0)
    day = (1_357_020_000_000.0, 1_357_020_000_001.0)
    asked = MeasureQuestions(quantiles=quantiles, ranks=ranks, ranges=((0.0, day[0]), (0.0, day[1]), (-math.inf, 5.5)))
    cells = row(asked)["ew"]
    assert list(cells["ranks"]) == ["1234567", "1234568", "0.5", "-3"]
    assert list(cells["ranges"]) == ["0:1357020000000", "0:1357020000001", "-inf:5.5"]
    assert list(cells["quantiles"]) == ["0.9999999", "1"]


def test_a_sample_shows_its_values() -> None:
    cells = row(MeasureQuestions(values=True, measures=("smp", "names", "new")))
    assert len(cells["smp"]["values"]) == 50 and set(cells["smp"]["values"]) <= set(MS.tolist())
    assert len(cells["names"]["values"]) == 20 and set(cells["names"]["values"]) <= {f"/{i}" for i in range(5)}
    assert cells["new"]["values"] == MS[-10:].tolist()


def test_more_of_a_list_than_a_measure_keeps_is_refused() -> None:
    with refused(InvalidRequest, "top"):
        row(MeasureQuestions(top=4))


def test_a_question_that_no_measure_answers_is_refused_with_the_possible_ones() -> None:
    stacks = {m.name: m.stack(None) for m in spec({"n": "count()", "f": "bloom(ip)"}).measures}
    with refused(InvalidRequest, "rank"):
        require_possible(MeasureQuestions(ranks=(1.0,)), stacks)
    require_possible(MeasureQuestions(items=("1",)), stacks)


def test_lists_are_columns_of_lists_in_arrow_and_json_texts_in_csv() -> None:
    questions = MeasureQuestions(measures=("top", "ew", "smp", "cm", "bf"))
    table = to_table(record(QUERY, SYNOPSIS), QUERY, questions)
    assert table.column("top.top").to_pylist()[0] == row()["top"]["top"]
    assert pa.types.is_list(table.schema.field("ew.buckets").type)
    assert {"cm", "cm_lower", "smp.mean", "smp.mean_upper", "smp.size", "ew.above", "bf.fill"} <= set(
        table.column_names
    )
    header, line = to_csv(record(QUERY, SYNOPSIS), QUERY, MeasureQuestions(measures=("top",))).decode().splitlines()
    assert header == '"top.top"'
    assert json.loads(line[1:-1].replace('""', '"'))[0]["item"] == 0
    asked = to_table(record(QUERY, SYNOPSIS), QUERY, MeasureQuestions(items=("5",), measures=("cm",)))
    assert asked.column_names == ["cm.items:5", "cm.items:5_lower", "cm.items:5_upper"]


def test_an_answer_without_data_has_the_same_columns_and_a_row() -> None:
    # Apart from samples of texts: without data it is not known that they are texts.
    asked = MeasureQuestions(measures=tuple(name for name in EVERY_FUNCTION if name != "names"))
    nothing, something = (to_table(record(QUERY, s), QUERY, asked) for s in (None, SYNOPSIS))
    assert nothing.num_rows == 1 and nothing.column_names == something.column_names
    assert nothing["bf"].to_pylist() == [0], "of no records"
    assert to_table(record(QUERY, None), QUERY, MeasureQuestions(items=("x",))).num_rows == 1


def test_withheld_records_widen_what_has_a_bound_and_make_the_rest_unknown() -> None:
    query = spec(EVERY_FUNCTION, budget={"staleness": "2s"})
    given = record(query, SYNOPSIS, withheld={"n": WithheldBound(3.0, 0.0)})
    (cells,), (whole,) = (render(r, query)["data"] for r in (given, record(query, SYNOPSIS)))
    assert cells["n"] == {"estimate": 4000, "lower": 4000, "upper": 4003}
    for of in (
        lambda c: c["cm"], lambda c: c["top"]["top"][0], lambda c: c["ew"]["buckets"][1], lambda c: c["bf"],
        lambda c: c["dis"], lambda c: c["smp"]["count"],
    ):  # fmt: skip
        assert (of(cells)["lower"], of(cells)["upper"]) == (of(whole)["lower"], of(whole)["upper"] + 3)
    for of in (lambda c: c["ed"]["boundaries"][1], lambda c: c["kl"]["quantiles"]["0.5"]):
        assert of(cells)["lower"] <= of(whole)["lower"] <= of(whole)["upper"] <= of(cells)["upper"]
    assert cells["smp"]["mean"]["lower"] is cells["smp"]["mean"]["upper"] is None
    assert cells["ed"]["boundaries"][0]["lower"] is None


def test_distinct_values_of_five_thousand_groups_are_right_in_any_selection() -> None:
    query = spec({"clients": "distinct(ip)"}, group_by=["url"])
    groups = 5000
    ids = np.repeat(np.arange(groups), 3)
    urls = pa.array([f"/{i:04d}" for i in ids.tolist()])
    batch = pa.record_batch({"url": urls, "ip": pa.array(np.arange(len(ids)) % (ids % 3 + 1))})
    synopsis = aggregate(query, batch).to_bytes()
    data = render(record(query, synopsis), query)["data"]
    assert [row["group"]["url"] for row in data] == [f"/{i:04d}" for i in range(groups)]
    truth = [len({k % (i % 3 + 1) for k in range(3 * i, 3 * i + 3)}) for i in range(groups)]
    assert [round(row["clients"]["estimate"]) for row in data] == truth
    (one,) = render(record(query, synopsis), query, MeasureQuestions(groups=(("url", ("/4998",)),)))["data"]
    assert one == data[4998]

"""The gateway's check of partials accepts what an edge ships, whatever the query's budget, sampling and groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from edge.core.events import Configured, Ingested, PullEvent, SourceEnded
from edge.core.streams import StreamSpec
from edgewater.base.streams import TIME_COLUMN
from edgewater.guard import partial_check
from edgewater.guard.partial_check import PartialCheck
from edgewater.model.query import QuerySpec
from edgewater.synopses import GroupedAggregate
from edgewater.wire import QueryRef
from tests.cores import open_core, pulled

COLUMNS = {"word": pa.string(), "number": pa.int64(), "amount": pa.float64(), "flag": pa.bool_()}
MEASURES = {
    "n": "count()", "present": "count(number)", "total": "sum(number)", "sums": "sum(amount)", "least": "min(amount)",
    "most": "max(number)", "mean": "mean(amount)", "spread": "var(number)", "users": "distinct(word, precision=6)",
    "latency": "quantiles(amount)", "ranks": "kll(number, k=10)", "top": "top_k(word, 3)",
    "hits": "count_min(word, width=32, depth=2)", "joins": "fast_agms(number, width=32, depth=3)",
    "seen": "bloom(word, bits=128)", "cells": "cuckoo(number, buckets=4)", "copies": "counting_cuckoo(word, buckets=2)",
    "sampled": "reservoir(word, 4)", "newest": "fifo(number, 3)", "biased": "biased(amount, 4)",
    "thinned": "bernoulli(amount, 0.5)", "bins": "equi_width(amount, 0, 10)", "depths": "equi_depth(amount)",
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "all measures": {"group_by": ["flag"]},
    "one group": {"group_by": None},
    "sessions": {"group_by": ["flag"], "window": {"session": "20s"}, "measures": {"n": "count()"}},
    "error budget": {
        "measures": {"n": "count()", "total": "sum(number)"}, "budget": {"error": {"total": 100, "n": "5%"}},
    },
    "staleness budget": {"measures": {"m": "max(amount)", "s": "mean(number)"}, "budget": {"staleness": "2s"}},
    "accuracy": {
        "group_by": ["word"], "accuracy": {"measure": "m", "error": "5%", "confidence": "95%"},
        "measures": {"m": "mean(amount)", "rows": "kmeans(number, amount, 2, limit=5)"},
    },
    "expressions": {"measures": {"m": "sum(number * amount)", "q": "exact_quantile(number, 0.9, limit=8)"}},
}  # fmt: skip


def batch(rng: np.random.Generator, start_ms: int) -> pa.RecordBatch:
    def with_nulls(values: Any, of: pa.DataType) -> pa.Array:
        return pa.array(values, of, mask=rng.random(len(values)) < 0.1)

    amounts = np.where(rng.random(120) < 0.1, np.nan, rng.normal(5, 2, 120) * 10.0 ** rng.integers(-3, 20, 120))
    return pa.record_batch(
        {
            "word": with_nulls([f"ж{i}" for i in rng.integers(0, 9, 120)], pa.string()),
            "number": with_nulls(rng.integers(-(1 << 62), 1 << 62, 120), pa.int64()),
            "amount": with_nulls(amounts, pa.float64()),
            "flag": with_nulls(rng.random(120) < 0.5, pa.bool_()),
            TIME_COLUMN: start_ms + np.arange(120) * 100,
        }
    )


@pytest.mark.parametrize("name", OTHERS)
def test_an_edge_s_partials_pass(name: str) -> None:
    query = {"name": "q", "from": "s", "group_by": ["word", "flag"], "window": {"tumbling": "5s"},
             "measures": MEASURES, **OTHERS[name]}  # fmt: skip
    spec = QuerySpec.from_mapping({key: value for key, value in query.items() if value is not None})
    core = open_core(StreamSpec(COLUMNS))
    core.handle(Configured(((QueryRef("q", 1), spec),)))
    rng = np.random.default_rng(7)
    checks = PartialCheck.of(spec), PartialCheck.of(spec, COLUMNS)
    shipped = 0
    for round_ in range(3):
        core.handle(Ingested("s", "file", batch(rng, round_ * 6_000), 1 << 40))
        if round_ == 2:
            core.handle(SourceEnded("s", "file"))
        while frames := pulled(core, PullEvent(1 << 14, {})):
            for partial in (p for frame in frames for p in frame.unpack().partials):
                assert checks[0].check(partial.synopsis) == checks[1].check(partial.synopsis)
                shipped += 1
    assert shipped > 1


def test_groups_of_a_fixed_size_are_sent_in_several_partials(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse count-min of a few bytes takes its whole width in a center's memory."""
    monkeypatch.setattr(partial_check, "MAX_STATE_BYTES", 1 << 16)
    spec = QuerySpec.from_mapping(
        {"name": "q", "from": "s", "group_by": "number", "window": {"tumbling": "1h"},
         "measures": {"m": "count_min(word, width=256, depth=4)"}}
    )  # fmt: skip
    core = open_core(StreamSpec(COLUMNS))
    core.handle(Configured(((QueryRef("q", 1), spec),)))
    core.handle(Ingested("s", "file", batch(np.random.default_rng(7), 0), 1 << 40))
    core.handle(SourceEnded("s", "file"))
    groups = []
    while frames := pulled(core, PullEvent(1 << 18, {})):
        groups += [len(GroupedAggregate.from_bytes(p.synopsis)) for f in frames for p in f.unpack().partials]
    assert max(groups) == 7 and sum(groups) > 100

"""Strata that are no number are one stratum, in every level of the merge: without Spark, but in its order."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from center.batch.compute_phase import BatchJob, ComputePhase
from center.batch.layout import RecordLayout
from center.batch.merge_phase import MergePhase
from center.batch.ordered import _ManagerBuilder, _PartBuilder
from center.batch.pattern import SynopsisPattern
from edgewater.model.windows import SlidingWindow, TumblingWindow
from edgewater.synopses import CountMin, HaarWavelet

LAYOUT = RecordLayout((("key", "float64"),), ("int64",), ("v",), "t")
ORDER = [(name, "ascending") for name in ("_s0", "block", "slice_start", "part")]


def partials_of(job: BatchJob, batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """What several tasks give, sorted."""
    tables = [pa.Table.from_batches(ComputePhase(job)(iter([batch]))) for batch in batches]
    return pa.concat_tables(tables).sort_by(ORDER).to_batches()


def counts(rows: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    return [(str(r["_s0"]), int(r["window_start"].timestamp() * 1000), r["records"]) for r in rows]


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (TumblingWindow("10s"), [("1.0", 0, 2), ("nan", 0, 4), ("nan", 10_000, 2)]),
        (SlidingWindow("20s", "10s"), [("1.0", -10_000, 2), ("1.0", 0, 2), ("nan", -10_000, 4), ("nan", 0, 6),
                                 ("nan", 10_000, 2)]),
    ],
    ids=["tumbling", "sliding"],
)  # fmt: skip
def test_partials_of_a_nan_stratum_belong_to_one_stratum(window: SlidingWindow, expected: Any) -> None:
    job = BatchJob(SynopsisPattern.of(CountMin(64, 3)), LAYOUT, window)
    keys, times = pa.array([math.nan, 1.0, math.nan, math.nan]), pa.array([1_000, 2_000, 3_000, 11_000])
    batch = pa.RecordBatch.from_arrays([keys, pa.array([5, 6, 7, 8]), times], names=["_s0", "_v0", "_t"])
    partials = partials_of(job, [batch, batch])
    rows = pa.Table.from_batches(MergePhase(job)(iter(partials))).to_pylist()
    assert counts(rows) == expected


def test_a_manager_of_a_stratum_that_is_nan_has_all_its_parts() -> None:
    job = BatchJob(SynopsisPattern.of(HaarWavelet()), LAYOUT, TumblingWindow("10s"), by_windows=True)
    numbers = np.arange(8)
    names = ["_s0", "_slice", "_p", "_n", "_t", "_v0"]
    columns = [pa.array([math.nan] * 8), pa.array([0] * 8), pa.array(numbers % 2), pa.array(numbers)]
    columns += [pa.array(numbers * 1000), pa.array(numbers)]
    placed = pa.Table.from_arrays(columns, names=names).sort_by([("_p", "ascending"), ("_n", "ascending")])
    # A part that lies in two batches, as Spark cuts them, is one part.
    parts = pa.Table.from_batches(_PartBuilder(job)(iter(placed.to_batches(max_chunksize=3))))
    assert parts.column("records").to_pylist() == [4, 4]
    registered = parts.sort_by(ORDER).to_batches(max_chunksize=1)
    (row,) = pa.Table.from_batches(_ManagerBuilder(job, 2)(iter(registered))).to_pylist()
    assert row["records"] == 8

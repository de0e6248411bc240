"""The paper's table 2 on the taxi rides: five queries, centralised and distributed, with the size ratio.

Relative accuracy is |answer - truth| / truth, averaged over all questions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from bench.condor.data import read_local
from center.batch import Strategy, build
from edgewater.synopses import (
    CountMin,
    Distinct,
    EquiWidthHistogram,
    Frequency,
    HaarWavelet,
    HyperLogLog,
    Mean,
    Range,
    RangeSum,
    ReservoirSample,
    from_bytes,
)

_STEP = 10_000


def table_2(
    spark: Any, path: Path, partitions: int, some: Callable[[Iterable[Any]], list[Any]]
) -> dict[str, dict[str, float]]:
    """Returns the rows of the table: by query, figures by name.

    Args:
        path: of the rides, as Parquet files.
        partitions: of the distributed set-up.
        some: selects the queries that run.
    """
    rides, df = read_local(path), spark.read.parquet(str(path))
    result = {}
    for name, make, column, error in some(_queries(rides)):
        rows = df.where(f"{column} is not null")
        ordered = name.startswith("(v)")
        built = {}
        for setup, parts in (("centralised", 1), ("distributed", partitions)):
            divide = "order_based" if ordered else ("centralised" if parts == 1 else "round_robin")
            strategy = Strategy(divide, "bucketing", partitions=parts)  # type: ignore[arg-type]
            (row,) = build(rows, make(), of=column, time="ts", strategy=strategy).collect()
            built[setup] = bytes(row.synopsis)
        sizes = {setup: float(len(data)) for setup, data in built.items()}
        result[name] = {
            **{setup: error(from_bytes(data)) for setup, data in built.items()},
            "size ratio": sizes["distributed"] / sizes["centralised"],
            "bytes": sizes["centralised"],
        }
    return result


def _queries(rides: Any) -> list[tuple[str, Callable[[], Any], str, Callable[[Any], float]]]:
    counts = {z["values"].as_py(): z["counts"].as_py() for z in pc.value_counts(rides["zone"])}
    routes = len(pc.unique(rides["route"]))
    near = pc.sum(pc.and_(pc.greater_equal(rides["distance"], 1.0), pc.less_equal(rides["distance"], 3.0))).as_py()
    mean = pc.mean(rides["passengers"]).as_py()
    order = pc.sort_indices(rides, sort_keys=[("ts", "ascending"), ("amount", "ascending")])
    amounts = rides["amount"].take(order).to_numpy()

    def frequencies(synopsis: Any) -> float:
        errors = [abs(synopsis.query(Frequency(zone)).value - n) / n for zone, n in counts.items()]
        return float(np.mean(errors))

    def sums(synopsis: Any) -> float:
        errors = []
        for first in range(0, len(amounts) - _STEP + 1, _STEP):
            truth = float(amounts[first : first + _STEP].sum())
            errors.append(abs(synopsis.query(RangeSum(first, first + _STEP - 1)).value - truth) / abs(truth))
        return float(np.mean(errors))

    def off(question: Any, truth: float) -> Callable[[Any], float]:
        return lambda synopsis: abs(synopsis.query(question).value - truth) / truth

    return [
        ("(i) count-min: rides per zone", lambda: CountMin(512, 5), "zone", frequencies),
        ("(ii) HyperLogLog: distinct routes", lambda: HyperLogLog(10), "route", off(Distinct(), routes)),
        ("(iii) equi-width: rides of 1 to 3 miles", lambda: EquiWidthHistogram(0, 30, 64), "distance",
         off(Range(1.0, 3.0), near)),
        ("(iv) reservoir: mean passengers", lambda: ReservoirSample(10_000), "passengers", off(Mean(), mean)),
        ("(v) Haar: sums of 10,000 rides", lambda: HaarWavelet(10_000), "amount", sums),
    ]  # fmt: skip

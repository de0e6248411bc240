"""Comparison with Spark's sketches on the same DataFrame: seconds, bytes, relative errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from bench.condor.data import read_local
from center.batch import build
from edgewater.synopses import CountMin, Distinct, Frequency, HyperLogLog, Kll, Quantile, from_bytes

QS = (0.01, 0.25, 0.5, 0.9, 0.99)


def compare(
    spark: Any,
    path: Path,
    seconds: Callable[[Callable[[], Any]], float],
    consume: Callable[[Any], None],
    some: Callable[[Iterable[Any]], list[Any]],
) -> dict[str, dict[str, float]]:
    """Compares both, by sketch: seconds, bytes and relative errors.

    Args:
        consume: runs a DataFrame from its source on. A second `collect` would reuse the first one's shuffle files.
        some: selects the sketches to compare.
    """
    from pyspark.sql import functions as F

    df = spark.read.parquet(str(path))
    table = read_local(path)
    keys, values = table["key"].to_numpy(), np.sort(table["value"].to_numpy())
    theirs = {
        "hyperloglog (lgK 12)": F.hll_sketch_agg("key", 12),
        "count-min (eps 0.0013)": F.count_min_sketch("key", F.lit(0.0013), F.lit(0.99), F.lit(7)),
        "kll (k 200)": F.kll_sketch_agg_double("value", 200),
    }
    ours = {
        "hyperloglog (lgK 12)": (HyperLogLog(12), "key"),
        "count-min (eps 0.0013)": (CountMin(2048, 5), "key"),
        "kll (k 200)": (Kll(200), "value"),
    }
    result: dict[str, dict[str, float]] = {}
    for name, expression in some(theirs.items()):
        aggregated = df.agg(expression.alias("s"))
        held = bytes(aggregated.collect()[0].s)
        synopsis, column = ours[name]
        out = build(df, synopsis, of=column)
        mine = bytes(out.collect()[0].synopsis)
        result[name] = {
            "spark s": seconds(lambda made=aggregated: consume(made)),
            "edgewater s": seconds(lambda made=out: consume(made)),
            "spark bytes": float(len(held)),
            "edgewater bytes": float(len(mine)),
        }
        result[name] |= _sketch_errors(name, aggregated, from_bytes(mine), keys, values)
    return result


def _sketch_errors(name: str, aggregated: Any, made: Any, keys: Any, values: Any) -> dict[str, float]:
    from pyspark.sql import functions as F

    def rank_error(quantiles: list[float]) -> float:
        off = [abs(np.searchsorted(values, v) / len(values) - q) for v, q in zip(quantiles, QS, strict=True)]
        return float(np.mean(off))

    if name.startswith("hyper"):
        distinct = len(np.unique(keys))
        estimated = aggregated.select(F.hll_sketch_estimate("s").alias("n")).collect()[0].n
        return _errors(abs(estimated - distinct) / distinct, _off(made.query(Distinct()).value, distinct))
    if name.startswith("kll"):
        columns = [F.kll_sketch_get_quantile_double("s", F.lit(float(q))).alias(f"q{i}") for i, q in enumerate(QS)]
        theirs = list(aggregated.select(*columns).collect()[0])
        return _errors(rank_error(theirs), rank_error([made.query(Quantile(q)).value for q in QS]))
    # Spark has no SQL function to query its count-min sketch, so there is no comparison of errors.
    items, counts = np.unique(keys, return_counts=True)
    off = [abs(made.query(Frequency(int(i))).value - n) / n for i, n in zip(items, counts, strict=True)]
    return {"edgewater error": float(np.mean(off))}


def _off(value: float, truth: float) -> float:
    return abs(value - truth) / truth


def _errors(theirs: float, mine: float) -> dict[str, float]:
    return {"spark error": float(theirs), "edgewater error": float(mine)}

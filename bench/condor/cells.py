"""Measurements on Spark. Each function runs in a separate process, pinned to a number of cores."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pyarrow.parquet as pq

from bench.condor.data import ORIGIN_MS, ROWS_PER_SECOND, synthetic, taxi
from center.batch import Strategy, build, evaluate
from center.batch.compute_phase import CHUNK_ROWS
from center.spark.spark_session import SessionConfig, start_session
from edgewater.model.windows import SlidingWindow, TumblingWindow
from edgewater.synopses import (
    BiasedReservoir,
    BloomFilter,
    CountMin,
    CuckooFilter,
    DDSketch,
    EquiDepthHistogram,
    EquiWidthHistogram,
    FastAgms,
    FifoSample,
    HaarWavelet,
    HyperLogLog,
    Kll,
    ReservoirSample,
)

T = TypeVar("T")
REPEATS = 3
WARM_UPS = 60
"""Builds of few records before `cost` measures. Meanwhile the JVM compiles the code that plans and starts jobs."""
SYNOPSES: dict[str, tuple[Callable[[], Any], str]] = {
    "count-min": (lambda: CountMin(2048, 5), "key"),
    "hyperloglog": (lambda: HyperLogLog(14), "key"),
    "fast-agms": (lambda: FastAgms(1024, 5), "key"),
    "bloom": (lambda: BloomFilter(1 << 13), "key"),
    "cuckoo": (lambda: CuckooFilter.for_capacity(2_000), "key"),
    "equi-width": (lambda: EquiWidthHistogram(0, 1000, 100), "value"),
    "equi-depth": (lambda: EquiDepthHistogram(1_000), "value"),
    "ddsketch": (lambda: DDSketch(), "value"),
    "kll": (lambda: Kll(), "value"),
    "reservoir": (lambda: ReservoirSample(10_000), "value"),
    "biased reservoir": (lambda: BiasedReservoir(1 << 13), "value"),
    "fifo": (lambda: FifoSample(10_000), "value"),
    "haar": (lambda: HaarWavelet(1000), "value"),
}
CONCURRENT = (1, 2, 5, 10, 20, 50, 100)
SOURCES = (1, 4, 16, 64, 256)


@dataclass(frozen=True, slots=True)
class CondorSize:
    """The size of a run.

    Attributes:
        rows: records of each data set.
        repeats: number of runs; the median is reported. 0: a single run without a warm-up.
        cases: number of entries that run of each list of synopses, queries or data sets. They are the last entries.
        concurrent: numbers of windows that overlap.
        partitions: partitions of the distributed set-up of table 2.
        made_rides: whether the rides of table 2 are generated.
        work: of Spark's session.
    """

    rows: int
    repeats: int = REPEATS
    cases: int = len(SYNOPSES)
    concurrent: tuple[int, ...] = CONCURRENT
    partitions: int = 64
    made_rides: bool = False
    work: Literal["bulk", "plans"] = "bulk"

    def some(self, cases: Iterable[T]) -> list[T]:
        """Returns the selected cases."""
        return list(cases)[-self.cases :]


SMOKE = CondorSize(
    10_000, repeats=0, cases=1, concurrent=(2,), partitions=2, made_rides=True, work="plans"
)  # each job runs once, so an optimising compiler does not pay


def session(cores: int, scratch: Path, work: Literal["bulk", "plans"]) -> Any:
    return start_session(SessionConfig(master=f"local[{cores}]", driver_memory="2g", scratch_dir=scratch, work=work))


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """Returns the median of several runs, after one run that warms up workers and JVM; with 0 repeats, the time of that
    run.
    """
    if repeats:
        run()
    taken = []
    for _ in range(max(repeats, 1)):
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def consume(df: Any) -> None:
    df.write.format("noop").mode("overwrite").save()


def concurrent(spark: Any, directory: Path, size: CondorSize) -> dict[str, dict[str, float]]:
    """Returns records/s by the number of overlapping windows, for bucketing and slicing."""
    df = spark.read.parquet(str(synthetic(directory, size.rows, zipf=False)))
    every_ms = max(size.rows // ROWS_PER_SECOND * 1000 // 200, 1)
    result: dict[str, dict[str, float]] = {}
    for compute in ("bucketing", "slicing"):
        strategy = Strategy("round_robin", compute)
        result[compute] = {}
        for windows in size.concurrent:
            window = SlidingWindow(every_ms * windows, every_ms)
            out = build(df, CountMin(256, 5), of="key", time="ts", window=window, strategy=strategy)
            result[compute][str(windows)] = size.rows / seconds(lambda out=out: consume(out), min(1, size.repeats))
    return result


def skew(spark: Any, directory: Path, size: CondorSize) -> dict[str, float]:
    """Returns records/s of count-min, global and stratified: uniform and Zipf keys in windows of 60 s, zones of taxi
    rides in windows of a month.
    """
    result = {}
    for name, key, window in size.some((("uniform", "key", "60s"), ("zipf", "key", "60s"), ("taxi", "zone", "30d"))):
        if name == "taxi":
            path = taxi(directory, size.rows, made=size.made_rides)
        else:
            path = synthetic(directory, size.rows, zipf=name == "zipf")
        df = spark.read.parquet(str(path)).where(f"{key} is not null")
        records = df.count()
        in_turn: list[Any] = ["auto", "auto", Strategy("round_robin", "bucketing")]
        labels = {"global": None, "stratified": key, "stratified, round robin": key}
        for (label, strata), strategy in zip(labels.items(), in_turn, strict=True):
            out = build(
                df, CountMin(64, 5), of=key, time="ts", window=TumblingWindow(window), stratify_by=strata,
                strategy=strategy,
            )  # fmt: skip
            result[f"{label}, {name}"] = records / seconds(lambda out=out: consume(out), min(1, size.repeats))
    return result


def sources(spark: Any, directory: Path, size: CondorSize) -> dict[str, dict[str, float]]:
    """Returns records/s of count-min by the number of partitions that records come in, by the way they are divided."""
    df = spark.read.parquet(str(synthetic(directory, size.rows, zipf=True)))
    result: dict[str, dict[str, float]] = {"distributed": {}, "centralised": {}}
    for number in size.some(SOURCES):
        parts = df.repartition(number).cache()
        parts.count()
        for way, rows in (("distributed", parts), ("centralised", parts.repartition(1))):
            out = build(rows, CountMin(2048, 5), of="key", time="ts", window=TumblingWindow("5s"))
            result[way][str(number)] = size.rows / seconds(lambda out=out: consume(out), min(1, size.repeats))
        parts.unpersist()
    return result


def disorder(spark: Any, directory: Path, size: CondorSize) -> dict[str, dict[str, float]]:
    """Returns records/s in order, and with 10 % of the records up to 10 s late, by class of algebra."""
    classes = {"commutative": "count-min", "by event time": "fifo", "order-based": "haar"}
    result: dict[str, dict[str, float]] = {}
    for label, share in size.some((("in order", 0.0), ("10 % late", 0.1))):
        df = spark.read.parquet(str(synthetic(directory, size.rows, zipf=True, late_share=share)))
        for name, kind in size.some(classes.items()):
            make, column = SYNOPSES[kind]
            out = build(df, make(), of=column, time="ts", window=TumblingWindow("20s"))
            result.setdefault(name, {})[label] = size.rows / seconds(lambda out=out: consume(out), min(1, size.repeats))
    return result


def evaluation(spark: Any, directory: Path, size: CondorSize) -> dict[str, float]:
    """Returns answers/s of the evaluation operators, with count-min and 120 windows."""
    df = spark.read.parquet(str(synthetic(directory, min(size.rows, 2_000_000), zipf=True)))
    span_ms = min(size.rows, 2_000_000) * 1000 // ROWS_PER_SECOND
    out = build(df, CountMin(2048, 5), of="key", time="ts", window=TumblingWindow(max(span_ms // 120, 1)))
    out = out.cache()
    out.count()
    questions_n = max(size.rows // 20, 1000)
    questions = spark.range(questions_n).selectExpr(
        "to_json(named_struct('question', 'frequency', 'item', cast(rand(7) * 1000 as bigint))) as question",
        f"{ORIGIN_MS} + cast(rand(8) * {span_ms} as bigint) as time",
    )
    questions = questions.repartition(4).cache()
    questions.count()
    result = {}
    for mode in ("latest", "timestamped"):
        answers = evaluate(out, questions, mode, last=None if mode == "latest" else 120)
        result[mode] = questions_n / seconds(lambda answers=answers: consume(answers), size.repeats)
    return result


def cost(spark: Any, directory: Path, size: CondorSize) -> dict[str, float]:
    """Returns records/s of a warm session, from `build` on, and of one thread, without windows, on the same files."""
    path, few = (synthetic(directory, rows, zipf=True) for rows in (size.rows, SMOKE.rows))
    df, small = (spark.read.parquet(str(p)) for p in (path, few))
    result = {}
    for _ in range(WARM_UPS if size.repeats else 0):
        consume(build(small, HyperLogLog(14), of="key", time="ts"))
    for name, (make, column) in size.some(SYNOPSES.items()):
        ways: dict[str, Callable[[], Any]] = {
            "spark": lambda m=make, c=column: consume(build(df, m(), of=c, time="ts")),
            "one thread": lambda m=make, c=column: _alone(path, m(), c),
        }
        for way, run in ways.items():
            result[f"{name}, {way}"] = size.rows / seconds(run, size.repeats)
    return result


def scan(spark: Any, directory: Path, size: CondorSize) -> dict[str, dict[str, float]]:
    """Returns records/s without windows, of files that tasks read themselves, and of rows that Spark hands over."""
    path = str(synthetic(directory, size.rows, zipf=True))
    ways = {"read by tasks": spark.read.parquet(path)}
    # Any option of the reader leaves the scan to Spark.
    ways["handed over"] = spark.read.option("pathGlobFilter", "*.parquet").parquet(path)
    result: dict[str, dict[str, float]] = {}
    timeless = [(name, given) for name, given in SYNOPSES.items() if not given[0]().properties.ordered]
    for name, (make, column) in size.some(timeless):
        for way, df in ways.items():
            out = build(df, make(), of=column)
            taken = seconds(lambda out=out: consume(out), size.repeats)
            result.setdefault(name, {})[way] = size.rows / taken
    return result


def _alone(path: Path, synopsis: Any, column: str) -> tuple[bytes, int, int]:
    """Returns the result of `build` in one thread, which reads two columns in pieces that stay in the cache."""
    least, most = np.iinfo(np.int64).max, np.iinfo(np.int64).min
    for file in sorted(path.glob("*.parquet")):
        with pq.ParquetFile(file) as opened:
            for batch in opened.iter_batches(CHUNK_ROWS, columns=["ts", column], use_threads=False):
                times = batch.column(0).to_numpy()
                least, most = min(least, int(times.min())), max(most, int(times.max()))
                synopsis.update(batch.column(1), times=times)
    return bytes(synopsis.to_bytes()), least, most


def accuracy(spark: Any, directory: Path, size: CondorSize) -> dict[str, dict[str, float]]:
    """Returns the rows of the paper's table 2."""
    from bench.condor.accuracy import table_2

    return table_2(spark, taxi(directory, size.rows, made=size.made_rides), size.partitions, size.some)


PARTS: dict[str, tuple[Callable[[Any, Path, CondorSize], Any], tuple[int, ...]]] = {
    "windows": (concurrent, (2,)),
    "accuracy": (accuracy, (2,)),
    "disorder": (disorder, (2,)),
    "skew": (skew, (2,)),
    "sources": (sources, (2,)),
    "evaluation": (evaluation, (1, 2)),
    "cost": (cost, (1, 2)),
    "scan": (scan, (1, 2)),
}
"""The function and the number of cores of each part."""


def child(parts: Sequence[str], cores: int, directory: str, size: CondorSize, answer: str) -> None:
    """Runs in a process that is pinned to its cores; JVM and workers inherit the affinity."""
    spark = session(cores, Path(directory) / "scratch", size.work)
    try:
        result = {part: PARTS[part][0](spark, Path(directory), size) for part in parts}
    finally:
        spark.stop()
    Path(answer).write_text(json.dumps(result))

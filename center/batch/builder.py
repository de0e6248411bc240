"""`build` builds synopses over any Spark DataFrame."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from center.batch.compute_phase import BatchJob, ComputePhase
from center.batch.inputs import BatchInput, ColumnLike, default_partitions, number_in_order, read_input
from center.batch.merge_phase import MergePhase
from center.batch.parquet_scan import ScanAndCompute, parquet_scan
from center.batch.pattern import SynopsisPattern
from center.batch.strategy import Strategy, check, choose
from center.batch.windows import Family, family_of
from edgewater.base.errors import InvalidRequest
from edgewater.model.windows import Window


def build(
    df: DataFrame,
    synopsis: Any,
    *,
    of: Any,
    time: ColumnLike | None = None,
    window: Window | None = None,
    stratify_by: Any = None,
    strategy: Strategy | Literal["auto"] = "auto",
) -> DataFrame:
    """Builds synopses of a DataFrame's values, one per window and stratum.

    Synopses are built when an action runs on the result. The arguments are checked against the schema
    at once. The footers of Parquet files are read at once to see whether tasks can read the files
    (`center.batch.parquet_scan`).

    Args:
        df: a batch DataFrame. Of a stream, each micro-batch of `foreachBatch` is one.
        synopsis: an empty synopsis or `GroupedAggregate`. The result's synopses have its kind, parameters and seed.
        of: the column of values, by name or as a `Column`. For a grouped aggregate, a mapping from the names of its
            keys and measures to columns. Null values are counted in `nulls` and skipped.
        time: event time, as a timestamp or as ms in a bigint. Not needed without a window. The job fails if a record
            has none.
        window: a window from `edgewater.model.windows`, or `center.batch.windows.SlidingCount`; None for one synopsis
            over all records. Count windows begin at each `every`-th record. The last count windows may have fewer
            records.
        stratify_by: columns. There is one synopsis per combination of their values. Null is a stratum of its own.
        strategy: "auto" derives the strategy from the synopsis' algebra and the window; `plan` returns this strategy.

    Returns:
        A DataFrame with these columns: the columns of `stratify_by`; `window_start`, `window_end` (timestamps; the end
        is exclusive); `synopsis` (bytes for `edgewater.synopses.from_bytes`, which merge with the synopses of edges);
        `records` (number of values in the synopsis); `nulls`.

    Raises:
        InvalidRequest: names the argument, its value and what is accepted.
    """
    if not isinstance(df, DataFrame):
        raise InvalidRequest("df", type(df).__name__, "a Spark DataFrame")
    if df.isStreaming:
        accepted = "a batch DataFrame, such as each micro-batch of foreachBatch"
        raise InvalidRequest("df", "a streaming DataFrame", accepted)
    pattern = SynopsisPattern.of(synopsis)
    family = family_of(window)
    job_input = read_input(df, pattern, of, time, stratify_by)
    chosen = _strategy(pattern, window, job_input, strategy)
    _check_time(pattern, family, time)
    job = BatchJob(
        job_input.pattern,
        job_input.layout,
        window,
        by_windows=chosen.compute == "bucketing",
        whole=not pattern.properties.mergeable,
        source=int(getattr(pattern.fresh(), "source", 0)),
    )
    return _named(_run(job_input, job, chosen), job)


def _run(job_input: BatchInput, job: BatchJob, chosen: Strategy) -> DataFrame:
    properties = job.pattern.properties
    if properties.ordered and not properties.commutative:
        from center.batch.ordered import build_ordered

        return build_ordered(job_input, job, chosen)
    return _merge(_compute(_divide(job_input, job, chosen), job), job, chosen)


def plan(synopsis: Any, *, window: Window | None = None, stratify_by: Any = None) -> Strategy:
    """Returns the strategy that "auto" chooses. The strategy's `explain()` gives the reason.

    Raises:
        InvalidRequest: there is no strategy for this synopsis and window.
    """
    return choose(SynopsisPattern.of(synopsis).properties, window, stratified=bool(stratify_by))


def _strategy(
    pattern: SynopsisPattern, window: Window | None, job_input: BatchInput, strategy: Strategy | str
) -> Strategy:
    stratified = bool(job_input.layout.strata)
    if strategy == "auto":
        return choose(pattern.properties, window, stratified=stratified)
    if not isinstance(strategy, Strategy):
        raise InvalidRequest("strategy", strategy, '"auto" or a Strategy(divide, compute)')
    check(strategy, pattern.properties, window, stratified=stratified)
    return strategy


def _check_time(pattern: SynopsisPattern, family: Family, time: ColumnLike | None) -> None:
    if time is not None:
        return
    if family is not Family.GLOBAL:
        raise InvalidRequest("time", None, "the column of event times", f"a {family.value} window needs it")
    if pattern.properties.ordered:
        raise InvalidRequest("time", None, "the column of event times", f"{pattern.kind} needs it")


def _divide(job_input: BatchInput, job: BatchJob, chosen: Strategy) -> tuple[DataFrame, BatchJob]:
    records, layout = job_input.records, job_input.layout
    keys = [F.col(k) for k in layout.keys]
    if chosen.divide == "stratified":
        return (records.repartition(chosen.partitions, *keys) if chosen.partitions else records.repartition(*keys)), job
    if chosen.divide == "centralised":
        return records.repartition(1), job
    if chosen.divide == "order_based":
        numbered = records.withColumn("_n", number_in_order(job_input, keys))
        spread = numbered.repartition(chosen.partitions or default_partitions(numbered))
        return spread, replace(job, layout=replace(layout, numbered=True))
    return (records.repartition(chosen.partitions) if chosen.partitions else records), job


def _compute(divided: tuple[DataFrame, BatchJob], job: BatchJob) -> DataFrame:
    records, job = divided
    scan = parquet_scan(records)
    if scan is None:
        return records.mapInArrow(ComputePhase(job), from_arrow_schema(job.layout.partial_schema))
    partitions = len(scan.plan.partitions)
    numbers = records.sparkSession.range(partitions, numPartitions=partitions)
    return numbers.mapInArrow(ScanAndCompute(job, scan), from_arrow_schema(job.layout.partial_schema))


def _merge(partials: DataFrame, job: BatchJob, chosen: Strategy) -> DataFrame:
    layout = job.layout
    tasks = chosen.partitions or default_partitions(partials)
    keys, order = list(layout.keys), [*layout.keys, "block", "slice_start", "part"]
    if not layout.strata and job.family is Family.GLOBAL:
        placed = partials.repartition(1)  # all rows are of one slice, and the task itself sorts them
    else:
        tasks = 1 if not layout.strata and job.family is Family.SESSION else tasks  # 1: all rows have the same key
        placed = partials.repartition(tasks, *keys, "block").sortWithinPartitions(*order)
    return placed.mapInArrow(MergePhase(job), from_arrow_schema(layout.result_schema))


def _named(result: DataFrame, job: BatchJob) -> DataFrame:
    for key, (name, _) in zip(job.layout.keys, job.layout.strata, strict=True):
        result = result.withColumnRenamed(key, name)
    return result

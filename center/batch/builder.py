"""`build` builds synopses over any Spark DataFrame."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as Over
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from center.batch.compute_phase import BatchJob, Compute
from center.batch.inputs import BatchInput, ColumnLike, read_input
from center.batch.merge_phase import CombineLevel, FinishLevel
from center.batch.parquet_scan import ScanAndCompute, parquet_scan
from center.batch.pattern import SynopsisPattern
from center.batch.strategy import Strategy, check, choose
from center.batch.streaming import keep_state
from center.batch.windows import Family, family_of
from edgewater.model.errors import InvalidRequest
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
    lateness: str | None = None,
    null_times: Literal["refuse", "count"] = "refuse",
) -> DataFrame:
    """Builds synopses of a DataFrame's values, one per window and stratum.

    Synopses are built when an action or `writeStream` runs on the result. The arguments are checked against the schema
    at once. The footers of Parquet files are read at once to see whether tasks can read the files
    (`center.batch.parquet_scan`).

    Args:
        df: a batch or streaming DataFrame.
        synopsis: an empty synopsis or `GroupedAggregate`. The result's synopses have its kind, parameters and seed.
        of: the column of values, by name or as a `Column`. For a grouped aggregate, a mapping from the names of its
            keys and measures to columns. Null values are counted in `nulls` and skipped.
        time: event time, as a timestamp or as ms in a bigint. Not needed without a window.
        window: a window from `edgewater.model.windows`, or `center.batch.windows.SlidingCount`; None for one synopsis
            over all records. Count windows begin at each `every`-th record. The last count windows may have fewer
            records.
        stratify_by: columns. There is one synopsis per combination of their values. Null is a stratum of its own.
        strategy: "auto" derives the strategy from the synopsis' algebra and the window; `plan` returns this strategy.
        lateness: only for a streaming DataFrame, such as "10 minutes": event time after the end of a window during
            which records may still change the window. Later records are counted.
        null_times: how to treat records without a time. "refuse": the job fails and reports the number of such records.
            "count": a row without a window has the number of such records.

    Returns:
        A DataFrame with these columns: the columns of `stratify_by`; `window_start`, `window_end` (timestamps; the end
        is exclusive); `synopsis` (bytes for `edgewater.synopses.from_bytes`, which merge with the synopses of edges);
        `records` (number of values in the synopsis); `nulls`; `revision`; `late`. Only a streaming DataFrame has more
        than one `revision`, and a `late` above 0. There, a row with a revision replaces the earlier rows of its window.
        If such a row has no synopsis, the window no longer exists. A row with `late` counts records that arrived too
        late for any window.

    Raises:
        InvalidRequest: names the argument, its value and what is accepted.
    """
    if not isinstance(df, DataFrame):
        raise InvalidRequest("df", type(df).__name__, "a Spark DataFrame")
    pattern = SynopsisPattern.of(synopsis)
    family = family_of(window)
    job_input = read_input(df, pattern, of, time, stratify_by)
    chosen = _strategy(pattern, window, job_input, strategy)
    _check_time(pattern, family, time, null_times)
    job = BatchJob(
        job_input.pattern,
        job_input.layout,
        window,
        by_windows=chosen.compute == "bucketing",
        streaming=bool(df.isStreaming),
        count_null_times=null_times == "count",
        whole=not pattern.properties.mergeable,
        source=int(getattr(pattern.fresh(), "source", 0)),
    )
    _check_lateness(df, chosen, family, lateness)
    return _named(_run(job_input, job, chosen, lateness), job)


def _run(job_input: BatchInput, job: BatchJob, chosen: Strategy, lateness: str | None) -> DataFrame:
    if chosen.merge == "manager":
        from center.batch.ordered import build_ordered

        return build_ordered(job_input, job, chosen)
    computed = _compute(_divide(job_input, job, chosen), job)
    return keep_state(computed, job, lateness) if job.streaming else _merge(computed, job, chosen)


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
        raise InvalidRequest("strategy", strategy, '"auto" or a Strategy(divide, compute, merge)')
    check(strategy, pattern.properties, window, stratified=stratified)
    return strategy


def _check_time(pattern: SynopsisPattern, family: Family, time: ColumnLike | None, null_times: str) -> None:
    if null_times not in ("refuse", "count"):
        raise InvalidRequest("null_times", null_times, '"refuse" or "count"')
    if time is not None:
        return
    if family is not Family.GLOBAL:
        raise InvalidRequest("time", None, "the column of event times", f"a {family.value} window needs it")
    if pattern.properties.ordered:
        raise InvalidRequest("time", None, "the column of event times", f"{pattern.kind} needs it")


def _check_lateness(df: DataFrame, chosen: Strategy, family: Family, lateness: str | None) -> None:
    if not df.isStreaming:
        if lateness is not None:
            raise InvalidRequest("lateness", lateness, "a streaming DataFrame", "a batch has all its records")
        return
    if chosen.divide == "order_based" or chosen.merge != "merge":
        raise InvalidRequest(
            "df",
            "a streaming DataFrame",
            "a batch DataFrame (such as each micro-batch of foreachBatch)",
            f"{chosen.divide} division needs all records of a window at once",
        )
    if family is not Family.GLOBAL and lateness is None:
        raise InvalidRequest(
            "lateness", None, 'an interval such as "10 minutes"', f"it bounds how long a {family.value} window is kept"
        )
    if family is Family.GLOBAL and lateness is not None:
        raise InvalidRequest("lateness", lateness, "none without a window", "one synopsis over everything never ends")


def _divide(job_input: BatchInput, job: BatchJob, chosen: Strategy) -> tuple[DataFrame, BatchJob]:
    records, layout = job_input.records, job_input.layout
    keys = [F.col(k) for k in layout.keys]
    if chosen.divide == "stratified":
        return (records.repartition(chosen.partitions, *keys) if chosen.partitions else records.repartition(*keys)), job
    if chosen.divide == "centralised":
        return records.repartition(1), job
    if chosen.divide == "order_based":
        numbered = records.withColumn("_n", number_in_order(job_input, keys))
        spread = numbered.repartition(chosen.partitions or _default_partitions(numbered))
        return spread, replace(job, layout=replace(layout, numbered=True))
    return (records.repartition(chosen.partitions) if chosen.partitions else records), job


def number_in_order(job_input: BatchInput, within: list[Column]) -> Column:
    """Returns a column with the number of each record in event time, from 0.

    Records with equal times are ordered by value. So the numbering is the same in each run, except among equal records.
    """
    values = [F.col(f"_v{i}") for i in range(len(job_input.layout.values))]
    over = Over.partitionBy(*within).orderBy(F.col("_t").asc_nulls_last(), *values)
    return (F.row_number().over(over) - 1).cast("bigint")


def _default_partitions(df: DataFrame) -> int:
    return int(df.sparkSession.conf.get("spark.sql.shuffle.partitions"))


def _compute(divided: tuple[DataFrame, BatchJob], job: BatchJob) -> DataFrame:
    records, job = divided
    scan = parquet_scan(records)
    if scan is None:
        return records.mapInArrow(Compute(job), from_arrow_schema(job.layout.partial_schema))
    partitions = len(scan.plan.partitions)
    numbers = records.sparkSession.range(partitions, numPartitions=partitions)
    return numbers.mapInArrow(ScanAndCompute(job, scan), from_arrow_schema(job.layout.partial_schema))


def _merge(partials: DataFrame, job: BatchJob, chosen: Strategy) -> DataFrame:
    layout = job.layout
    tasks = chosen.partitions or _default_partitions(partials)
    keys, order = list(layout.keys), [*layout.keys, "block", "slice_start", "part"]
    for level in range(1, chosen.depth):
        # With depth d, each level reduces the number of parts by the same factor; the last level leaves one part.
        parts = 1 << (8 * (chosen.depth - level) // chosen.depth)
        among = F.pmod(F.col("part"), F.lit(parts))
        placed = partials.repartition(tasks, *keys, "block", "slice_start", among)
        partials = (
            placed.withColumn("part", among)
            .sortWithinPartitions(*order)
            .mapInArrow(CombineLevel(job), from_arrow_schema(layout.partial_schema))
        )
    if not layout.strata and job.family is Family.GLOBAL:
        placed = partials.repartition(1)  # all rows are of one slice, and the task itself sorts them
    else:
        tasks = 1 if not layout.strata and job.family is Family.SESSION else tasks  # 1: all rows have the same key
        placed = partials.repartition(tasks, *keys, "block").sortWithinPartitions(*order)
    return placed.mapInArrow(FinishLevel(job), from_arrow_schema(layout.result_schema))


def _named(result: DataFrame, job: BatchJob) -> DataFrame:
    for key, (name, _) in zip(job.layout.keys, job.layout.strata, strict=True):
        result = result.withColumnRenamed(key, name)
    return result

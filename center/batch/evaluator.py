"""Evaluates questions on windows' synopses on Spark (Condor, section 6).

The mode *latest* evaluates a question on the newest windows. The mode *timestamped* evaluates it on all windows that
contain the question's timestamp. The synopses are broadcast. The questions stay in their partitions and are evaluated
in parallel.
"""

from __future__ import annotations

import io
from typing import Any, Literal

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import Window as Over
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema

from center.batch.layout import FORMER_COLUMNS, RESULT_COLUMNS
from center.batch.questions import (
    ANSWER_DDL,
    ANSWER_FIELDS,
    EvaluateQuestions,
    EvaluateWindows,
    NamedQuestion,
    parse_question_json,
)
from center.batch.sql_functions import merge_function
from edgewater.base.errors import InvalidRequest
from edgewater.synopses import Question

BROADCAST_BYTES = 1 << 30  # limit: memory of executors
"""Maximum size of the windows that are broadcast to the executors."""


def evaluate(
    out: DataFrame,
    questions: Question | str | DataFrame,
    mode: Literal["latest", "timestamped"] = "latest",
    *,
    last: int | None = None,
    stratified: bool | None = None,
    question: str = "question",
    time: str = "time",
) -> DataFrame:
    """Evaluates questions on the result of `build`, or on a stored result.

    Args:
        out: a batch DataFrame with `build`'s columns. Of a result of release 0.3, the newest revision of each window is
            used.
        questions: one question, as an object of `edgewater.synopses` or as JSON (`{"question": "quantile", "q":
            0.99}`); or a DataFrame of questions, batch or streaming.
        mode: "latest" evaluates each question on the newest windows. "timestamped" evaluates it on the windows that
            contain the question's time.
        last: number of newest windows to use per stratum. If None, one window for "latest", and all windows for
            "timestamped".
        stratified: whether to evaluate each stratum separately. A DataFrame of questions then needs the columns of the
            strata. If None, true if there are strata. If false, the strata's synopses are merged.
        question: name of the column of JSON strings in a DataFrame of questions.
        time: name of the column of timestamps (or ms) in a DataFrame of questions.

    Returns:
        A DataFrame with the strata or the columns of the questions, then window_start, window_end, estimate, lower,
        upper, confidence, basis, error (the reason if there is no answer). A question without a window has a row, too.

    Raises:
        InvalidRequest: names the argument that is not accepted.
    """
    if out.isStreaming:
        accepted = "a batch DataFrame: write the stream, and read the result in foreachBatch of the questions"
        raise InvalidRequest("out", "a streaming DataFrame", accepted)
    if mode not in ("latest", "timestamped"):
        raise InvalidRequest("mode", mode, '"latest" or "timestamped"')
    if last is not None and (isinstance(last, bool) or not isinstance(last, int) or last < 1):
        raise InvalidRequest("last", last, "a whole number of windows, at least 1")
    keep = last or (1 if mode == "latest" else None)
    windows, strata = _windows(out, stratified, keep)
    if isinstance(questions, DataFrame):
        return _evaluate_questions(windows, strata, questions, question, time if mode == "timestamped" else None)
    if mode == "timestamped":
        raise InvalidRequest("questions", questions, f"a DataFrame with the columns {question} and {time}")
    asked = parse_question_json(questions) if isinstance(questions, str) else questions
    if not isinstance(asked, NamedQuestion | Question):
        raise InvalidRequest("questions", questions, "a question, JSON, or a DataFrame")
    selected = windows.select(*strata, "window_start", "window_end", "synopsis")
    schema = pa.schema(list(to_arrow_schema(windows.select(*strata).schema)))
    ddl = ", ".join([*_ddl(windows, strata), ANSWER_DDL])
    return selected.mapInArrow(EvaluateWindows(asked, schema), ddl)


def _latest_revisions(out: DataFrame) -> DataFrame:
    """Returns one row per existing window of a result of release 0.3: its newest revision. Rows that only count
    records are dropped.
    """
    strata = _strata(out)
    rows = out.where(F.col("synopsis").isNotNull() | (F.col("revision").isNotNull() & (F.col("late") == 0)))
    values = F.struct("synopsis", "records", "nulls")
    keys = [*strata, "window_start", "window_end"]
    newest = rows.groupBy(*keys).agg(F.max_by(values, F.col("revision")).alias("_newest"))
    return newest.select(*keys, "_newest.*").where(F.col("synopsis").isNotNull())


def _strata(out: DataFrame) -> list[str]:
    missing = [name for name in RESULT_COLUMNS if name not in out.columns]
    if missing:
        raise InvalidRequest("out", f"columns {', '.join(out.columns)}", f"build's columns, also {', '.join(missing)}")
    return [name for name in out.columns if name not in (*RESULT_COLUMNS, *FORMER_COLUMNS)]


def _windows(out: DataFrame, stratified: bool | None, keep: int | None) -> tuple[DataFrame, list[str]]:
    strata = _strata(out)
    windows = _latest_revisions(out) if set(FORMER_COLUMNS) <= set(out.columns) else out
    if stratified and not strata:
        raise InvalidRequest("stratified", stratified, "False", "it was built without stratify_by")
    if strata and stratified is False:
        windows = windows.groupBy("window_start", "window_end").agg(merge_function()("synopsis").alias("synopsis"))
        strata = []
    if keep is not None:
        newest = Over.partitionBy(*strata).orderBy(F.col("window_end").desc(), F.col("window_start").desc())
        windows = windows.withColumn("_age", F.row_number().over(newest)).where(F.col("_age") <= keep).drop("_age")
    return windows, strata


def _evaluate_questions(
    windows: DataFrame, strata: list[str], questions: DataFrame, question: str, time: str | None
) -> DataFrame:
    wanted = [question, *strata, *([] if time is None else [time])]
    for name in wanted:
        if name not in questions.columns:
            accepted = f"a DataFrame with the columns {', '.join(wanted)}"
            raise InvalidRequest("questions", f"columns {', '.join(questions.columns)}", accepted)
    taken = [name for name in questions.columns if name in {f.name for f in ANSWER_FIELDS}]
    if taken:
        raise InvalidRequest("questions", f"columns {', '.join(taken)}", "other names", "the answer has these columns")
    given = dict(questions.dtypes)[question]
    if given != "string":
        raise InvalidRequest("questions", f"column {question} of type {given}", "a column of JSON texts")
    if time is not None and dict(questions.dtypes)[time] not in ("timestamp", "timestamp_ntz", "bigint"):
        given = dict(questions.dtypes)[time]
        raise InvalidRequest("questions", f"column {time} of type {given}", "timestamp, timestamp_ntz or bigint (ms)")
    selected = windows.select(*strata, "window_start", "window_end", "synopsis")
    names = questions.columns
    ask = EvaluateQuestions(
        _broadcast(questions.sparkSession, selected.orderBy(F.col("window_end").desc(), *strata)),
        pa.schema(list(to_arrow_schema(questions.schema))),
        names.index(question),
        None if time is None else names.index(time),
        [names.index(s) for s in strata],
    )
    return questions.mapInArrow(ask, ", ".join([*_ddl(questions, names), ANSWER_DDL]))


def _broadcast(spark: SparkSession, windows: DataFrame) -> Any:
    table = windows.toArrow()
    if table.nbytes > BROADCAST_BYTES:
        reason = f"{len(table)} windows of {table.nbytes} bytes would be sent to every executor"
        raise InvalidRequest("last", len(table), f"fewer windows: at most {BROADCAST_BYTES} bytes", reason)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return spark.sparkContext.broadcast(sink.getvalue())


def _ddl(df: DataFrame, names: list[str]) -> list[str]:
    types = dict(df.dtypes)
    return [f"`{name.replace('`', '``')}` {types[name]}" for name in names]

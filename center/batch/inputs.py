"""Selects a job's input columns from a user's DataFrame, and checks their types before the job runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as Over
from pyspark.sql import functions as F

from center.batch.layout import FORMER_COLUMNS, RESULT_COLUMNS, SPARK_TYPES, RecordLayout
from center.batch.pattern import SynopsisPattern
from edgewater.base.errors import InvalidRequest

ColumnLike: TypeAlias = "str | Column"
"""The name of a column, or an expression."""
_TYPE_OF = {
    "tinyint": "int64",
    "smallint": "int64",
    "int": "int64",
    "bigint": "int64",
    "float": "float64",
    "double": "float64",
    "string": "string",
    "boolean": "bool",
}
_TIMES = ("timestamp", "timestamp_ntz", "bigint")
_TIMES_ACCEPTED = "timestamp, timestamp_ntz (read as UTC) or bigint (ms since the epoch)"


@dataclass(frozen=True, slots=True)
class BatchInput:
    """A job's input.

    Attributes:
        records: a DataFrame with the strata `_s0`…, the values `_v0`…, and the event time `_t` if there is one.
        pattern: the pattern; for a grouped aggregate, with the names of its arguments.
    """

    records: DataFrame
    layout: RecordLayout
    pattern: SynopsisPattern


def read_input(
    df: DataFrame, pattern: SynopsisPattern, of: Any, time: ColumnLike | None, stratify_by: Any
) -> BatchInput:
    """Returns the input of a job. The arguments are arguments of `build`.

    Raises:
        InvalidRequest: names the column, its type and what is accepted.
    """
    strata = [_column(df, f"stratify_by[{i}]", given) for i, given in enumerate(_listed(stratify_by))]
    for name, given, _ in strata:
        _type_of("stratify_by", name, given, tuple(SPARK_TYPES))
        if name in (taken := (*RESULT_COLUMNS, *FORMER_COLUMNS)):
            accepted = f"another name than {', '.join(taken)}"
            raise InvalidRequest("stratify_by", name, accepted, "results have this column")
    if len({name for name, _, _ in strata}) < len(strata):
        raise InvalidRequest("stratify_by", [name for name, _, _ in strata], "columns of different names")
    pattern, values = _values(df, pattern, of)
    layout = RecordLayout(
        strata=tuple((name, _TYPE_OF[given]) for name, given, _ in strata),
        values=tuple(_TYPE_OF[given] for _, given, _ in values),
        value_names=tuple(name for name, _, _ in values),
    )
    columns = [
        column.cast(SPARK_TYPES[_TYPE_OF[given]]).alias(f"_{letter}{i}")
        for letter, found in (("s", strata), ("v", values))
        for i, (_, given, column) in enumerate(found)
    ]
    if time is not None:
        name, given, column = _column(df, "time", time)
        if given not in _TIMES:
            raise InvalidRequest("time", f"column {name} of type {given}", _TIMES_ACCEPTED)
        layout = replace(layout, time=name)
        columns.append(column.alias("_t"))
    return BatchInput(df.select(*columns), layout, pattern)


def number_in_order(job_input: BatchInput, within: list[Column]) -> Column:
    """Returns a column with the number of each record in event time, from 0.

    Records with equal times are ordered by value. So the numbering is the same in each run, except among equal records.
    """
    values = [F.col(f"_v{i}") for i in range(len(job_input.layout.values))]
    over = Over.partitionBy(*within).orderBy(F.col("_t").asc_nulls_last(), *values)
    return (F.row_number().over(over) - 1).cast("bigint")


def default_partitions(df: DataFrame) -> int:
    """Returns the number of tasks after a shuffle, if a strategy does not give it."""
    return int(df.sparkSession.conf.get("spark.sql.shuffle.partitions"))


def _values(df: DataFrame, pattern: SynopsisPattern, of: Any) -> tuple[SynopsisPattern, list[tuple[str, str, Column]]]:
    if not pattern.is_grouped:
        if isinstance(of, Mapping) or of is None:
            raise InvalidRequest("of", of, "a column of values")
        found = _column(df, "of", of)
        _type_of("of", found[0], found[1], pattern.types)
        return pattern, [found]
    names = [key for key, _ in pattern.keys]
    if not isinstance(of, Mapping) or not set(names) <= set(of) or not set(of) <= {*names, *pattern.measures}:
        accepted = f"a mapping from {', '.join([*names, *pattern.measures])} to columns; a count needs none"
        raise InvalidRequest("of", of, accepted)
    arguments = tuple(m for m in pattern.measures if m in of)
    result = [_column(df, f"of.{name}", of[name]) for name in (*names, *arguments)]
    for (key, wanted), (name, given, _) in zip(pattern.keys, result, strict=False):
        _type_of(f"of.{key}", name, given, (wanted,))
    for measure, (name, given, _) in zip(arguments, result[len(names) :], strict=True):
        _type_of(f"of.{measure}", name, given, pattern.types)
    return replace(pattern, arguments=arguments), result


def _listed(given: Any) -> Sequence[Any]:
    if given is None:
        return ()
    if isinstance(given, str | Column):
        return (given,)
    if not isinstance(given, Sequence):
        raise InvalidRequest("stratify_by", given, "a column, or a list of columns")
    return tuple(given)


def _column(df: DataFrame, field: str, given: Any) -> tuple[str, str, Column]:
    """Returns the name, the Spark type and the expression of a column."""
    if not isinstance(given, str | Column):
        raise InvalidRequest(field, given, "the name of a column, or a Column")
    if isinstance(given, str):
        alike = [field for field in df.schema.fields if field.name.lower() == given.lower()]
        if len(alike) == 1 and alike[0].name == given:  # needs no analysis by Spark
            return given, alike[0].dataType.simpleString(), F.col(_quoted(given))
    # A string is always the name of a column and not an expression, even `a.b` or `a-b`.
    column = F.col(_quoted(given)) if isinstance(given, str) and given in df.columns else given
    try:
        (described,) = df.select(column).schema.fields
    except (AnalysisException, ValueError) as exc:
        known = ", ".join(df.columns) or "none: the DataFrame has no columns"
        raise InvalidRequest(field, str(given), f"one of the columns {known}", _first_line(exc)) from exc
    return described.name, described.dataType.simpleString(), F.col(column) if isinstance(column, str) else column


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


def _type_of(field: str, name: str, given: str, accepted: tuple[str, ...]) -> None:
    if _TYPE_OF.get(given) not in accepted:
        listed = " or ".join(sorted(spark for spark, ours in _TYPE_OF.items() if ours in accepted))
        hint = "; cast it first" if given not in _TYPE_OF else ""
        raise InvalidRequest(field, f"column {name} of type {given}", f"a column of type {listed}{hint}")


def _first_line(exc: Exception) -> str:
    return str(exc).strip().splitlines()[0].rstrip(".;") if str(exc).strip() else type(exc).__name__

"""Answers as tables with a row per group. CSV, Arrow, `SELECT … FROM query` and sinks use them."""

from __future__ import annotations

from functools import partial
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from center.catalog import Catalog
from center.results import AnswerRecord, as_far_as_readable
from center.serving.measures import NO_QUESTIONS, MeasureQuestions
from center.serving.render import EvaluatedAnswer, evaluated
from edgewater.answers import Facts, Phase
from edgewater.answers.cells import beyond_int64
from edgewater.base.errors import InvalidQuery
from edgewater.model.own_columns import OWN_COLUMNS, own_names, with_own_columns
from edgewater.model.query import BoundQuery, QuerySpec
from edgewater.model.replies import Members
from edgewater.model.table_texts import without_zone
from edgewater.synopses import GroupedAggregate
from edgewater.wire import QueryRef

BEYOND = "beyond-int64"
"""The code in the column ``contract`` of a row in which an integer beyond int64 is null. JSON has the integer."""


def stated_answer(record: AnswerRecord, spec: QuerySpec, schema: pa.Schema) -> tuple[pa.Table, EvaluatedAnswer]:
    """Returns an answer, and its rows as a table with the columns of `with_quality` and times of type `TIME`.

    Args:
        schema: the types of its columns (`answer_schema`).
    """
    answer = as_far_as_readable(partial(evaluated, spec=spec), record)
    return without_zone(with_quality(with_types(answer.table(), schema), answer)), answer


def with_quality(table: pa.Table, answer: EvaluatedAnswer, *, text_times: bool = False) -> pa.Table:
    """Prepends the answer's own columns, so that no row looks complete or exact if it is not.

    Args:
        text_times: whether times are RFC 3339 texts instead of timestamps.
    """
    record, members = answer.record, cast(Members, answer.members())
    starts = {"window_start": record.window_start_ms, "window_end": record.window_end_ms}
    times_ms = {**starts, "given_at": record.answered_at_ms}
    table = with_own_columns(table, members, times_ms, text_times=text_times)
    at = list(OWN_COLUMNS).index("contract")
    return table.set_column(at, table.column_names[at], _contracts(answer, table.num_rows))


def _contracts(answer: EvaluatedAnswer, rows: int) -> pa.Array:
    """Returns the codes of the contract for each row, with `BEYOND` where a number of the row is beyond int64."""
    contract = answer.stated.contract
    stated = pa.repeat(pa.scalar(contract.codes, pa.string()), rows)
    beyond = [beyond_int64(each.estimates) for values in answer.rows.values for each in values.intervals]
    if not beyond or answer.rows.length != rows or not (lost := np.any(beyond, axis=0)).any():
        return stated
    return pc.if_else(pa.array(lost), BEYOND if contract.met else f"{contract.codes}; {BEYOND}", stated)


def with_version(table: pa.Table, version: int) -> pa.Table:
    """Adds the version of the query behind the answer's own columns."""
    name = own_names(table.column_names[len(OWN_COLUMNS) :])["version"]
    return table.add_column(len(OWN_COLUMNS), name, pa.repeat(pa.scalar(version, pa.int64()), table.num_rows))


def has_types(catalog: Catalog, spec: QuerySpec) -> bool:
    """Returns whether the columns of the stream are known, so that `empty_table` has the types of answers."""
    return _bound(catalog, spec) is not None


def empty_table(catalog: Catalog, spec: QuerySpec) -> pa.Table:
    """Returns the table of a query without answers, with the types of `answer_schema`."""
    return without_zone(page_without_answers(spec, answer_schema(catalog, spec)))


def page_without_answers(spec: QuerySpec, schema: pa.Schema) -> pa.Table:
    """Returns a table without rows, with the answer's own columns and those of `answer_schema`."""
    return with_quality(schema.empty_table(), _empty_answer(spec, None))


def answer_schema(catalog: Catalog, spec: QuerySpec, questions: MeasureQuestions = NO_QUESTIONS) -> pa.Schema:
    """Returns the groups and measures of a query's answers, with their types in each table of answers.

    The types follow from the query and the columns of the stream, by its declaration or by an edge, and not from the
    values of an answer. As long as neither exists, a key is a text and a measure a float64.
    """
    bound = _bound(catalog, spec)
    schema = _empty_answer(spec, bound, questions).table().schema
    if bound is not None:
        return schema
    return pa.schema([f.with_type(pa.string()) if pa.types.is_null(f.type) else f for f in schema])


def _empty_answer(
    spec: QuerySpec, bound: BoundQuery | None, questions: MeasureQuestions = NO_QUESTIONS
) -> EvaluatedAnswer:
    synopsis = None
    if bound is not None:
        arguments = {b.measure.name: None if b.argument is None else b.argument.type for b in bound.measures}
        stacks = {m.name: m.stack(arguments[m.name]) for m in spec.measures}
        synopsis = GroupedAggregate(dict(zip(spec.group_by, bound.group_types, strict=True)), stacks).to_bytes()
    record = AnswerRecord(0, QueryRef(spec.name, 0), 0, 0, 0, Phase.EARLY, 0, 0, Facts(0, 0, 0.0), synopsis)
    return evaluated(record, spec, questions)


def _bound(catalog: Catalog, spec: QuerySpec) -> BoundQuery | None:
    declared = catalog.streams.declared().get(spec.stream)
    served = [declared.types] if declared is not None else []
    served += [s.columns for e in catalog.edges.all() if not e.retired and (s := e.stream(spec.stream)) is not None]
    for columns in served:
        try:
            return spec.bind(columns)
        except InvalidQuery:
            continue
    return None


def with_types(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Returns a table in which a column without a value has its type in `schema`.

    The type of a value follows from its synopsis, which has the types of the query.
    """
    types = {field.name: field.type for field in schema}
    for at, (field, column) in enumerate(zip(table.schema, table.columns, strict=True)):
        kind = types.get(field.name, field.type)
        if kind != field.type and column.null_count == len(column):
            table = table.set_column(at, field.name, pa.nulls(len(column), kind))
    return table

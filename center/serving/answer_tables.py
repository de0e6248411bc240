"""Answers as tables with a row per group. CSV, Arrow, `SELECT … FROM query` and sinks use them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from center.catalog import Catalog
from center.results import AnswerRecord, as_far_as_readable
from center.serving.measures import NO_QUESTIONS, MeasureQuestions
from center.serving.render import Answer, evaluated
from edgewater.answers import Facts, Phase
from edgewater.answers.cells import beyond_int64
from edgewater.model.errors import InvalidQuery
from edgewater.model.key_texts import OWN_COLUMNS, own_names
from edgewater.model.query import BoundQuery, QuerySpec
from edgewater.model.registered_query import RegisteredQuery
from edgewater.model.table_texts import TIME, to_json
from edgewater.model.timestamps import rfc3339
from edgewater.synopses import GroupedAggregate
from edgewater.wire import QueryRef

BEYOND = "beyond-int64"
"""The code in the column ``contract`` of a row in which an integer beyond int64 is null. JSON has the integer."""


def stated_answer(record: AnswerRecord, query: RegisteredQuery, schema: pa.Schema) -> tuple[pa.Table, Answer]:
    """Returns an answer, and its rows as a table with the columns of `with_quality` and times of type `TIME`.

    Args:
        schema: the types of its columns (`answer_schema`).
    """
    answer = as_far_as_readable(partial(evaluated, spec=query.spec), record)
    return without_zone(with_quality(with_types(answer.table(), schema), answer)), answer


def with_quality(table: pa.Table, answer: Answer, *, text_times: bool = False) -> pa.Table:
    """Prepends the answer's own columns, so that no row looks complete or exact if it is not.

    Args:
        text_times: whether times are RFC 3339 texts instead of timestamps.
    """

    def time(millis: int) -> pa.Scalar:
        return pa.scalar(rfc3339(millis), pa.string()) if text_times else pa.scalar(millis, pa.timestamp("ms", "UTC"))

    record, stated = answer.record, answer.stated
    values = (
        time(record.window_start_ms),
        time(record.window_end_ms),
        pa.scalar(record.phase.value, pa.string()),
        pa.scalar(record.revision, pa.int64()),
        pa.scalar(record.facts.ratio, pa.float64()),
        time(record.answered_at_ms),
        pa.scalar(stated.contract.codes, pa.string()),
        pa.scalar(to_json(stated.error["withheld"]).decode(), pa.string()),
    )
    names, columns = own_names(table.column_names), dict(zip(OWN_COLUMNS, values, strict=True))
    for at, (name, value) in enumerate(columns.items()):
        column = pa.repeat(value, table.num_rows) if name != "contract" else _contracts(answer, table.num_rows)
        table = table.add_column(at, names[name], column)
    return table


def _contracts(answer: Answer, rows: int) -> pa.Array:
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
    answer = _empty_answer(spec, _bound(catalog, spec))
    table = with_types(answer.table(), answer_schema(catalog, spec))
    return without_zone(with_quality(table, answer)).slice(0, 0)


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


def _empty_answer(spec: QuerySpec, bound: BoundQuery | None, questions: MeasureQuestions = NO_QUESTIONS) -> Answer:
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


def without_zone(table: pa.Table) -> pa.Table:
    """Returns the table with times of type `TIME`."""
    fields = [f.with_type(TIME) if pa.types.is_timestamp(f.type) else f for f in table.schema]
    return table.cast(pa.schema(fields))


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

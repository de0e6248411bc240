"""Renders an answer as JSON, an Arrow table, or CSV. Pure.

Intervals are the synopsis' own, widened by what edges withhold (`center.serving.withheld`). Where no bound is known, as
for a mean whose records are withheld, the bounds are null.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from center.results import AnswerRecord
from center.serving.function_values import DEFAULT_CONFIDENCE, function_confidence
from center.serving.measures import NO_QUESTIONS, MeasureEvaluator, MeasureQuestions, computed_values, includes
from center.serving.predictions import RecordsOut, SynopsisAccuracy, add_expected
from center.serving.totals import AnswerTotals, Rests, answer_totals, is_sampled
from center.serving.widening import Lacking, Widening
from center.serving.withheld import GroupsWithheld
from edgewater.answers.cells import (
    CellColumn,
    FunctionErrors,
    IntervalPart,
    Part,
    equal_cells,
    joined_rows,
    part_columns,
    part_shape,
    row_intervals,
)
from edgewater.answers.own_error import OwnError
from edgewater.answers.statement import Statement, judged
from edgewater.answers.work import spend
from edgewater.base.timestamps import rfc3339
from edgewater.model.computed import BINOMIAL, ComputedValue
from edgewater.model.json_types import Document, Group, Json, as_document
from edgewater.model.key_texts import NOT_FINITE, NULL, text_of_key
from edgewater.model.measure import Measure
from edgewater.model.query import QuerySpec
from edgewater.model.table_texts import Texts, joined, json_text, key_texts, plain_key, to_json
from edgewater.synopses import Estimates, GroupedAggregate, IntArray, RowSampleStack, SampleStack, Stack
from edgewater.synopses.key_table import KeyTable
from edgewater.synopses.rests import has_exact_rest

_NOTHING = object()
SUMMARY_GROUPS = 5  # format: of summaries, in the API's reference
_NO_MEMBERS: Document = {}

__all__ = ["NO_QUESTIONS", "MeasureQuestions", "denoted_values", "evaluated", "render"]


@dataclass(frozen=True, slots=True)
class AnswerRows:
    """An answer's rows as columns, sorted by group unless asked otherwise.

    Attributes:
        withheld: what edges withhold of the rows.
        codes: int64 per row, the number of its group in the merged data; empty without merged data.
    """

    groups: dict[str, pa.Array]
    values: tuple[CellColumn, ...]
    length: int
    withheld: GroupsWithheld
    codes: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))

    def texts(self) -> Texts:
        """The rows as JSON."""
        groups = [t for n, c in self.groups.items() for t in (",", f"{json_text(n)}:", key_texts(c))]
        measures = [t for v in self.values for t in (f",{json_text(v.measure)}:", v.texts(self.length))]
        head = pa.repeat(pa.scalar('{"group":{'), self.length)
        return joined(head, *groups[1:], "}", *measures, "}")

    def widest(self, count: int) -> IntArray:
        """The rows whose first interval is widest, unknown ones first, and of equal ones the largest values;
        ascending.
        """
        first = next((each.estimates for values in self.values for each in values.intervals), None)
        if first is None or self.length <= count:
            return np.arange(min(count, self.length))
        width = np.asarray(first.upper, float) - np.asarray(first.lower, float)
        width = np.where(np.isfinite(first.lower) & np.isfinite(first.upper), width, np.inf)
        return np.sort(np.lexsort((-np.nan_to_num(first.value, nan=-np.inf), -width))[:count])

    def changed_since(self, before: AnswerRows) -> tuple[IntArray, list[Group]]:
        """Compares two revisions of a window: the rows that are new or have other cells, and the groups that are gone.

        Args:
            before: the rows of the earlier revision, for the same questions.
        """
        at = _positions(self.groups, before.groups, self.length, before.length)
        old = np.flatnonzero(at >= 0)
        same = np.ones(len(old), bool)
        for mine, theirs in zip(self.values, before.values, strict=True):
            same &= equal_cells(mine, theirs, old, at[old], (self.length, before.length))
        changed = np.ones(self.length, bool)
        changed[old[same]] = False
        gone = np.setdiff1d(np.arange(before.length), at[old])
        groups = {name: column.take(pa.array(gone)) for name, column in before.groups.items()}
        return np.flatnonzero(changed), group_cells(groups, len(gone))


def render(
    record: AnswerRecord,
    spec: QuerySpec,
    questions: MeasureQuestions = NO_QUESTIONS,
    *,
    summary: bool = False,
    base: AnswerRecord | None = None,
) -> bytes:
    """Renders the JSON documented in `docs/reference/query.md`, without line breaks. NaN and infinity become null.

    Args:
        summary: `data` has only the `SUMMARY_GROUPS` groups whose first measure has the widest interval, unknown ones
            first, and of equal ones the largest values; `groups` is the number of all.
        base: an earlier revision of the window: `data` has only the groups whose cells differ, `base` is its revision,
            `removed` lists the groups that are gone, and `groups` is the number of all.

    Raises:
        InvalidRequest: a question that a measure's synopsis cannot answer.
        SynopsisError: the stored bytes cannot be read.
    """
    answer = evaluated(record, spec, questions)
    rows = answer.rows
    if base is None and not summary:
        return answer.json(rows)
    shown, removed = np.arange(rows.length), list[Group]()
    if summary:
        shown = rows.widest(SUMMARY_GROUPS)
    elif base is not None:
        shown, removed = rows.changed_since(answer_rows(base, spec, questions))
    chosen = rows
    if len(shown) < rows.length:
        chosen = answer_rows(record, spec, questions, merged=answer.merged, codes=rows.codes[shown])
    members: dict[str, Json] = {"groups": rows.length}
    if base is not None:
        members |= {"base": base.revision, "removed": removed}
    return answer.json(chosen, members)


@dataclass(frozen=True, slots=True)
class EvaluatedAnswer:
    """An evaluated answer.

    Attributes:
        rows: the rows that the questions select.
        stated: the statement of the whole answer.
        totals: what it states about all groups.
        merged: `merged_data` of the record.
    """

    record: AnswerRecord
    rows: AnswerRows
    stated: Statement
    totals: AnswerTotals
    merged: GroupedAggregate | None

    def json(self, rows: AnswerRows, more: Document = _NO_MEMBERS) -> bytes:
        """Returns the answer as JSON with these rows, and with more members."""
        before, after = to_json(self.members({"data": [], **more})).split(b'"data":[]', 1)
        return b"".join((before, b'"data":[', b",".join(joined_rows(rows.texts())), b"]", after))

    def members(self, more: Document = _NO_MEMBERS) -> Document:
        """Returns the members of the answer as JSON without its rows, and more members in their place."""
        record = self.record
        return {
            "query": record.query.name,
            "version": record.query.version,
            "window": {"start": rfc3339(record.window_start_ms), "end": rfc3339(record.window_end_ms)},
            "phase": record.phase.value,
            "revision": record.revision,
            **({"data_of": record.data_of} if record.data_of else {}),
            "given_at": rfc3339(record.answered_at_ms),
            **more,
            **self.totals.members(),
            "shapes": {
                c.measure: [as_document(part_shape(part, c.measure)) for part in c.parts] for c in self.rows.values
            },
            "confidence": min((c for column in self.rows.values if (c := column.confidence) is not None), default=None),
            "quality": as_document(self.stated.quality()),
            "contract": as_document(self.stated.contract.to_json()),
        }

    def table(self) -> pa.Table:
        """Returns the rows as a table.

        Group columns come first, then per measure m the float64 columns ``m``, ``m_lower`` and ``m_upper``, or
        ``m_0.5``, ``m_0.5_lower``, … for quantiles; other members of a cell are ``m.member`` (and its bounds), lists
        are list columns. Unknown values are null.

        An answer without any group has a row of nulls, since a table of no rows would not state that there is an
        answer. Group columns are of type null then, as no edge has reported their types.
        """
        record, rows = self.record, self.rows
        columns: dict[str, pa.Array] = dict(rows.groups)
        for values in rows.values:
            for part in values.parts:
                for name, column in part_columns(part, values.measure, rows.length).items():
                    while name in columns:  # a group column has that name
                        name = f"answer_{name}"
                    columns[name] = column
        if record.synopsis is None and not rows.length and not record.facts.is_merged_session:
            columns = {name: pa.nulls(1, column.type) for name, column in columns.items()}
        return pa.table(columns)


def evaluated(record: AnswerRecord, spec: QuerySpec, questions: MeasureQuestions = NO_QUESTIONS) -> EvaluatedAnswer:
    """Evaluates questions on an answer.

    Raises:
        InvalidRequest: a question that a measure's synopsis cannot answer.
        SynopsisError: the stored bytes cannot be read.
    """
    merged = merged_data(record)
    rows = answer_rows(record, spec, questions, merged=merged)
    stated = statement_of(record, spec, rows, questions, merged)
    return EvaluatedAnswer(record, rows, stated, answer_totals(record, spec, questions, merged), merged)


def statement_of(
    record: AnswerRecord,
    spec: QuerySpec,
    rows: AnswerRows | None = None,
    questions: MeasureQuestions = NO_QUESTIONS,
    merged: GroupedAggregate | None = None,
) -> Statement:
    """Returns the statement of an answer: of the whole one, whatever part of it is requested.

    Args:
        rows: the rows of these questions, if they are evaluated already.
    """
    if rows is None or questions != NO_QUESTIONS:
        rows = answer_rows(record, spec, NO_QUESTIONS, merged=merged, is_sorted=False)
    return judged(record.facts, rows.values, spec, record.of_windows)


def merged_data(record: AnswerRecord) -> GroupedAggregate | None:
    """The merged data of an answer, with a row for each group that has a prediction only; None: nothing has arrived."""
    if record.synopsis is None:
        return None
    aggregate = GroupedAggregate.from_bytes(record.synopsis, are_distinct=True)  # the job has read or written them
    add_expected(aggregate, record.facts.predicted)
    return aggregate


def answer_rows(
    record: AnswerRecord,
    spec: QuerySpec,
    questions: MeasureQuestions,
    new_error: Callable[[bool], OwnError] = OwnError,
    merged: GroupedAggregate | None = None,
    is_sorted: bool = True,
    codes: IntArray | None = None,
) -> AnswerRows:
    """The rows that the questions select.

    Args:
        merged: `merged_data` of the record, if they are read already.
        is_sorted: whether the rows are sorted by group, which costs as much as to read them.
        codes: the rows, some of those that the questions select, in their order (`AnswerRows.codes`); None: all.
    """
    is_subset = codes is not None
    data = _selected_data(record, spec, questions, merged, is_sorted, codes)
    groups, order = data.groups, data.codes
    facts, accuracy = record.facts, SynopsisAccuracy.of(spec, data.stacks)
    out = RecordsOut.of(spec, facts.predicted, groups, data.stacks)
    lacking = Lacking.of(facts, groups, len(order))
    widening = Widening(groups, data.withheld, lacking, facts.predicted, out, accuracy)

    def evaluator(measure: Measure, questions: MeasureQuestions = questions) -> MeasureEvaluator:
        confidence = function_confidence(spec, measure, data.groups_in_all, questions.confidence)
        stack = data.stacks[measure.name]
        own = new_error(isinstance(stack, SampleStack | RowSampleStack))
        asked = questions if out is None else out.asked(measure, questions)
        return MeasureEvaluator(measure, stack, asked, partial(widening.widen, measure), confidence, own)

    computed, needs_all = computed_values(questions, spec), bool(questions.computed) or questions.selection.is_needed
    read = {name for value in computed for name in value.reads()}
    shown = [evaluator(m) for m in spec.measures if needs_all or m.name in read or includes(questions, m)]
    parts = [e.parts() for e in shown]
    values = [_column(e, *each, data.withheld, accuracy) for e, each in zip(shown, parts, strict=True)]
    intervals = {each.column: each.estimates for v in values for each in v.intervals}
    if questions.by_parameter and read:  # derived measures read values, and not the answers to these questions
        of_values = MeasureQuestions(confidence=questions.confidence)
        for measure in (m for m in spec.measures if m.name in read):
            for part in evaluator(measure, of_values).parts()[0]:
                intervals |= {each.column: each.estimates for each in row_intervals(part, measure.name)}
    predicted = "" if facts.predicted is None or facts.predicted.of_records else facts.predicted.measure
    values += _computed_values(spec, computed, intervals, questions.confidence or DEFAULT_CONFIDENCE, predicted)
    names = {m.name for m in spec.values if includes(questions, m)}
    names |= {v.name for v in questions.computed}
    stated = tuple(v for v in values if v.measure in names)
    rows = AnswerRows(groups, stated, len(order), data.withheld, order)
    if is_subset or not questions.selection.is_needed:
        return rows
    chosen = questions.selection.rows(groups, _shown(spec, intervals), len(order))
    return answer_rows(record, spec, questions, new_error, merged, is_sorted, order[chosen])


def _column(
    evaluated: MeasureEvaluator,
    parts: Sequence[Part],
    function: FunctionErrors | None,
    withheld: GroupsWithheld,
    accuracy: SynopsisAccuracy | None,
) -> CellColumn:
    """Returns the values of a measure, with what their evaluation has shown."""
    name = evaluated.measure.name
    return CellColumn(
        name,
        parts,
        evaluated.own,
        withheld.excess.get(name),
        name in withheld.without_bound,
        0.0 if accuracy is None else accuracy.worst.get(name, 0.0),
        function,
    )


def _computed_values(
    spec: QuerySpec,
    computed: Iterable[ComputedValue],
    intervals: dict[str, Estimates],
    confidence: float,
    predicted: str,
) -> list[CellColumn]:
    """Returns the values that are computed from measures, and adds them to the intervals.

    Args:
        confidence: of binomial intervals.
        predicted: the measure that stands for records which have not arrived. Of other measures only the part is known
            that has arrived, so nothing is computed from both.
    """
    values, ahead = [], {predicted}
    for value in computed:
        is_derived, names, read = value in spec.derived, value.reads(), intervals
        if not is_derived:
            read = _shown(spec, intervals)
        if names <= ahead:
            ahead.add(value.name)
        elif names & ahead:
            unknown = np.full(len(intervals[predicted]), np.nan)
            read = read | {name: Estimates(unknown, unknown, unknown) for name in names & read.keys()}
        intervals[value.name] = value.estimates(read, spec.measures)
        parts = [IntervalPart("", intervals[value.name])]
        if is_derived and (rate := value.binomial(read, spec.measures, confidence)) is not None:
            parts.append(IntervalPart(BINOMIAL, rate))
            intervals[f"{value.name}.{BINOMIAL}"] = rate
        values.append(CellColumn(value.name, parts, OwnError()))
    return values


def _shown(spec: QuerySpec, intervals: Mapping[str, Estimates]) -> dict[str, Estimates]:
    """Returns the intervals that requests may read. Hidden parts of derived measures are left out."""
    hidden = {measure.name for measure in spec.measures if measure.part_of}
    return {name: each for name, each in intervals.items() if name not in hidden}


@dataclass(frozen=True, slots=True)
class _SelectedData:
    """The merged data of some groups.

    Attributes:
        codes: as of `AnswerRows`.
        groups_in_all: number of groups of the answer.
    """

    groups: dict[str, pa.Array]
    stacks: dict[str, Stack]
    codes: IntArray
    groups_in_all: int
    withheld: GroupsWithheld


def _selected_data(
    record: AnswerRecord,
    spec: QuerySpec,
    questions: MeasureQuestions,
    merged: GroupedAggregate | None,
    is_sorted: bool,
    codes: IntArray | None,
) -> _SelectedData:
    """Returns the data of the groups that the questions select; the arguments are as of `answer_rows`."""
    withheld = GroupsWithheld.of(spec, record.facts.withheld)
    if record.synopsis is None:
        # Without groups, there is a value of no records.
        no_rows = spec.group_by or record.facts.is_merged_session
        order: IntArray = np.arange(0 if no_rows else 1) if codes is None else codes
        stacks = {m.name: m.stack(None) for m in spec.measures}
        for stack in stacks.values():
            stack.grow(len(order))
        withheld = _with_rests(record, spec, stacks, withheld)
        return _SelectedData({name: pa.nulls(0) for name in spec.group_by}, stacks, order, 0, withheld)
    aggregate = merged_data(record) if merged is None else merged
    assert aggregate is not None
    if codes is None:
        selected = _select_groups(aggregate, questions)
        spend(cells=len(selected))
        codes = sorted_groups(aggregate, selected) if is_sorted else selected
    groups = dict(zip(aggregate.key_names, aggregate.rows(codes), strict=True))
    stacks = dict(aggregate.measures)
    withheld = withheld.of_rows(aggregate, codes, groups, record.facts.edges)
    if not np.array_equal(codes, np.arange(len(aggregate))):
        stacks = {name: stack.take(codes) for name, stack in stacks.items()}
    withheld = _with_rests(record, spec, stacks, withheld)
    return _SelectedData(groups, stacks, codes, len(aggregate), withheld)


def _with_rests(
    record: AnswerRecord, spec: QuerySpec, stacks: dict[str, Stack], withheld: GroupsWithheld
) -> GroupsWithheld:
    """Adds what edges withhold to the only row of a query without groups, where edges state it exactly.

    Args:
        stacks: the stack of each measure; changed.

    Returns:
        What else is withheld.
    """
    if spec.group_by or not withheld.edges.bounds or record.facts.is_merged_session or is_sampled(spec, record.facts):
        return withheld
    rests, exact = Rests(record.facts.rests), set[str]()
    for measure in spec.measures:
        if measure.name not in rests.of_measures:
            continue  # no edge states a rest
        data = rests.stack_without_data(measure) if record.synopsis is None else stacks[measure.name]
        if has_exact_rest(data) and rests.missing(measure, data) == 0.0:
            stacks[measure.name] = rests.merged(measure, data)
            exact.add(measure.name)
    return replace(withheld, exact=frozenset(exact))


def group_cells(groups: Mapping[str, pa.Array], rows: int) -> list[Group]:
    """The group of each row as JSON."""
    if not groups:
        return [{} for _ in range(rows)]
    keys = zip(*(column.to_pylist() for column in groups.values()), strict=True)
    return [{n: plain_key(v) for n, v in zip(groups, key, strict=True)} for key in keys]


def _positions(groups: Mapping[str, pa.Array], among: Mapping[str, pa.Array], rows: int, among_rows: int) -> IntArray:
    """The position in `among` of each row's group; -1: it is not there."""
    columns, others = list(groups.values()), list(among.values())
    if rows == among_rows and all(c.equals(o) for c, o in zip(columns, others, strict=True)):
        return np.arange(rows)
    types = tuple(c.type for c in columns)
    if types != tuple(c.type for c in others):  # no edge had reported the types
        return np.full(rows, -1)
    table = KeyTable(types)
    codes, other_codes = table.encode(columns, rows), table.encode(others, among_rows)
    result = np.full(len(table), -1)
    result[other_codes] = np.arange(among_rows)
    return result[codes]


def sorted_groups(aggregate: GroupedAggregate, codes: IntArray) -> IntArray:
    """The codes sorted by the key columns, so that equal data render equally whatever the merge order was."""
    if not aggregate.key_names or len(codes) < 2:
        return codes
    keys = pa.table(dict(zip(aggregate.key_names, aggregate.rows(codes), strict=True)))
    by = [(name, "ascending") for name in aggregate.key_names]
    order: IntArray = codes[pc.sort_indices(keys, sort_keys=by).to_numpy()]
    return order


def _select_groups(aggregate: GroupedAggregate, questions: MeasureQuestions) -> IntArray:
    columns = dict(zip(aggregate.key_names, aggregate.rows(), strict=True)) if questions.groups else {}
    keep = np.ones(len(aggregate), bool)
    for name, texts in questions.groups:
        keep &= pc.is_in(columns[name], denoted_values(texts, columns[name].type)).to_numpy(zero_copy_only=False)
    return np.flatnonzero(keep)


def denoted_values(texts: Iterable[str], key_type: pa.DataType) -> pa.Array:
    """Returns the keys of this type whose texts (`key_text`) are given; ``null`` denotes the null of any type."""
    values = [None if text == NULL else _denoted(text, key_type) for text in texts]
    return pa.array([value for value in values if value is not _NOTHING], key_type)


def _denoted(text: str, key_type: pa.DataType) -> Any:
    if pa.types.is_string(key_type):
        return text_of_key(text)
    if pa.types.is_boolean(key_type):
        return {"true": True, "false": False}.get(text, _NOTHING)
    try:
        if pa.types.is_floating(key_type):
            number = float(text) + 0.0  # keys have one zero, and -0.0 + 0.0 is 0.0
            return number if math.isfinite(number) or text in NOT_FINITE else _NOTHING
        whole = int(text)
        return whole if -(1 << 63) <= whole < 1 << 63 else _NOTHING
    except ValueError:
        return _NOTHING

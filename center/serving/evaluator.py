"""Evaluates questions on answered windows: the latest, those at a time, or one by its start (Condor, section 6).

Pure: takes a question and a source of windows (`AnsweredWindows`), returns JSON lines. A global question merges the
groups' synopses, a stratified one selects a group; otherwise there is an answer per group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from center.results import AnswerRecord
from center.serving.function_values import FunctionValues, function_confidence
from center.serving.measures import MeasureWidening
from center.serving.predictions import RecordsOut
from center.serving.question_lines import Arguments, QuestionLine, SecondSynopsis
from center.serving.render import sorted_groups
from center.serving.synopsis_cache import SynopsisCache
from center.serving.totals import Rests
from center.serving.widening import Lacking, Widening
from center.serving.withheld import GroupsWithheld, record_count
from edgewater.answers import Predicted
from edgewater.answers.cells import CellColumn, IntervalPart, ListPart, Part
from edgewater.answers.own_error import OwnError
from edgewater.answers.statement import completeness
from edgewater.answers.uniting import union_of_windows, united, united_rests
from edgewater.answers.work import spend
from edgewater.base.errors import IncompatibleSynopses, InvalidRequest, NotFound
from edgewater.base.timestamps import rfc3339
from edgewater.model.json_types import Document, Group, Json, as_document
from edgewater.model.key_texts import NOT_FINITE
from edgewater.model.measure import Measure
from edgewater.model.query import QuerySpec
from edgewater.model.table_texts import plain_key
from edgewater.model.windows import TimeWindow
from edgewater.synopses import GroupedAggregate, ItemRanking, Stack, TopItems
from edgewater.synopses.named_questions import (
    BINARY_QUESTIONS,
    INTEGER_QUESTIONS,
    default_question,
    evaluate_question,
    merge_groups,
    parse_question,
    require_confidence,
    top_items_question,
)
from edgewater.synopses.shapes import shows_integers

MERGED_AT_ONCE = 10  # limit: time between two looks at the budget
"""Windows whose data are merged between two looks at the budget of the request."""


class AnsweredWindows(Protocol):
    """The newest answers to the windows of one query, without their synopses."""

    @property
    def spec(self) -> QuerySpec: ...

    def latest(self, count: int) -> Sequence[AnswerRecord]:
        """The last `count` windows with an answer (or fewer), ascending."""

    def at(self, time_ms: int) -> Sequence[AnswerRecord]:
        """Every window that contains the time, ascending."""

    def starting(self, start_ms: int) -> AnswerRecord | None:
        """The window with this start."""

    def aggregate(self, window: AnswerRecord) -> GroupedAggregate | None:
        """The window's synopses; None: no edge had data."""

    def empty(self, windows: Sequence[tuple[int, int]]) -> Collection[tuple[int, int]]:
        """Those of these windows, each with start and end, that have no answer because they are empty."""

    def for_query(self, query: str) -> AnsweredWindows:
        """The windows of another query. Raises NotFound."""


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Answers questions about one query's windows.

    Attributes:
        synopses: cache of decoded and merged synopses, shared by all questions on a window.
    """

    windows: AnsweredWindows
    synopses: SynopsisCache

    def answer(self, question: QuestionLine) -> Iterator[Document]:
        """Yields one line per window, or a single line with `merge`. Lazy: a reader that leaves stops the work.

        Raises:
            InvalidRequest: a measure, group or question that does not fit; a merge of overlapping windows.
            NotFound: no such window has an answer, or it has no such group.
            SynopsisError: stored bytes cannot be read.
        """
        spec = self.windows.spec
        measure = _measure(question, spec)
        _check_group(question, spec)
        found = self._find(question)
        if not found:
            is_empty = self._is_empty(question)
            why = "is closed by all edges without a record, so it has no answer" if is_empty else "has an answer"
            which = "the window" if is_empty else "no window"
            raise NotFound(f"query {spec.name}: {which} {question.windows_text} {why}")
        for windows in [found] if question.merge else [[window] for window in found]:
            yield _Line(self.windows, self.synopses, question, measure, windows).answer()

    def _find(self, question: QuestionLine) -> Sequence[AnswerRecord]:
        if question.latest is not None:
            return self.windows.latest(question.latest)
        if question.at_ms is not None:
            return self.windows.at(question.at_ms)
        assert question.start_ms is not None
        window = self.windows.starting(question.start_ms)
        return [] if window is None else [window]

    def _is_empty(self, question: QuestionLine) -> bool:
        """Returns whether a selected window has no answer because it is empty."""
        window, time_ms = self.windows.spec.window, question.start_ms if question.at_ms is None else question.at_ms
        if not isinstance(window, TimeWindow) or time_ms is None:
            return False
        start_ms = window.slice_start(time_ms) if question.start_ms is None else time_ms
        return bool(self.windows.empty([(start_ms, window.end(start_ms))]))


@dataclass(frozen=True, slots=True)
class _Line:
    """One line: a question about a measure of some windows."""

    windows: AnsweredWindows
    synopses: SynopsisCache
    question: QuestionLine
    measure: Measure
    found: Sequence[AnswerRecord]

    @property
    def spec(self) -> QuerySpec:
        return self.windows.spec

    @property
    def is_own(self) -> bool:
        """Whether the question is about the measure's own value. Amounts of a sum do not bound the answers to other
        questions."""
        return self.question.name in (None, self.measure.function.name)

    def answer(self) -> Document:
        """Returns the line. Raises as `Evaluator.answer`."""
        spec, question = self.spec, self.question
        stack, groups = self._stack(self.measure)
        windows, arguments = list(self.found), question.arguments
        withheld = self._withheld(groups)
        if question.name in BINARY_QUESTIONS:
            other, theirs, there = self._other()
            arguments = {**arguments, "other": other}
            windows += theirs
            more = GroupsWithheld.of(there, union_of_windows(there, [w.facts.withheld for w in theirs]))
            withheld = withheld.beside(more)
        # A function of a sample takes long and does not change its stack, so it needs no lock.
        computed = question.name is None and self.measure.function.sample is not None
        with nullcontext() if computed else self.synopses.exclusively():
            widening = self._widening(windows, stack, groups, withheld)
            confidence = function_confidence(spec, self.measure, len(stack), question.confidence)
            widen = partial(widening.widen, self.measure, own=self.is_own)
            answer = _StackAnswer(self.measure, question, stack, groups, widen, confidence)
            return {**self._head(), **answer.to_json(arguments)}

    def _head(self) -> Document:
        """The members of a line besides its values. Merged windows have the least advanced phase and all revisions."""
        question, found, first = self.question, self.found, self.found[0]
        head: dict[str, Json] = {"id": question.id, "query": self.spec.name, "measure": self.measure.name}
        if question.name is not None:
            head["question"] = question.name
        if question.group is not None:
            head["group"] = dict(question.group)
        head["window"] = {"start": rfc3339(first.window_start_ms), "end": rfc3339(max(w.window_end_ms for w in found))}
        head["phase"] = min((w.phase for w in found), key=lambda phase: phase.rank).value
        if not question.merge:
            return {**head, "revision": first.revision, "completeness": as_document(completeness(first.facts))}
        head["windows"] = [{"start": rfc3339(w.window_start_ms), "revision": w.revision} for w in found]
        return {**head, "completeness": as_document(completeness(united([w.facts for w in found], self.spec)))}

    def _widening(
        self, windows: Sequence[AnswerRecord], stack: Stack, groups: list[Group] | None, withheld: GroupsWithheld
    ) -> Widening:
        """Returns how to widen the intervals of a stack that was merged from the data of some windows."""
        of_all = bool(self.spec.group_by) and (self.question.is_global or self.question.name in BINARY_QUESTIONS)
        keys = {} if of_all else self._key_columns(groups)
        predicted: Predicted | None = None
        out = None
        if any(w.facts.predicted is not None for w in windows):
            # Predictions of several windows or groups cannot be added, so nothing is stated of their sum.
            several = len(windows) > 1 or of_all
            predicted = Predicted() if several else windows[0].facts.predicted or Predicted()
            out = self._records_out(stack, keys, predicted)
        lacking = Lacking.of(united([w.facts for w in windows], self.spec), keys, len(stack))
        return Widening(keys, withheld, lacking, predicted, out)

    def _key_columns(self, groups: list[Group] | None) -> dict[str, pa.Array]:
        """Returns the key columns of the groups; None: of the group that the question selects."""
        rows = [self.question.group or {}] if groups is None else groups
        return {name: pa.array([row[name] for row in rows]) for name in self.spec.group_by}

    def _records_out(self, stack: Stack, keys: Mapping[str, pa.Array], predicted: Predicted) -> RecordsOut | None:
        """Returns the records that may be out of an early answer's synopsis; None: it is not known how many."""
        spec, name, count = self.spec, self.measure.name, record_count(self.spec)
        if not predicted.measure or spec.accuracy is None or name not in spec.accuracy.measures:
            return None
        stacks = {name: stack}
        if count is not None:
            stacks[count.name] = self._stack(count)[0]
        return RecordsOut.of(spec, predicted, keys, stacks)

    def _withheld(self, groups: list[Group] | None) -> GroupsWithheld:
        """What edges withhold of the groups that the question selects."""
        spec, measure, is_global = self.spec, self.measure, self.question.is_global
        bounds = union_of_windows(spec, [w.facts.withheld for w in self.found])
        if is_global:
            rests, aggregate = self._rests(), self._aggregate(self._key(measure))
            stack = rests.stack_without_data(measure) if aggregate is None else aggregate.measures[measure.name]
            withheld = rests.withheld(spec, measure, stack, bounds)
        else:
            withheld = GroupsWithheld.of(spec, bounds)
        count = record_count(spec)
        if bounds and not is_global:
            edges = united([w.facts for w in self.found], spec).edges
            withheld = withheld.of_edges(self._key_columns(groups), edges)
        is_by_amount = measure.function.error is not None and self.is_own
        if count is None or not withheld.edges.bounds or is_by_amount:
            return withheld
        return replace(withheld, sent=self._stack(count)[0].query().value)

    def _key(self, measure: Measure) -> tuple[Any, ...]:
        """Returns the key of a measure's synopses in the cache."""
        return tuple(map(data_key, self.found)), measure.name

    def _rests(self) -> Rests:
        return Rests(united_rests(self.spec, [window.facts.rests for window in self.found]))

    def _stack(self, measure: Measure) -> tuple[Stack, list[Group] | None]:
        """The stack to evaluate and its groups; None: it is one synopsis, of all groups or of the selected one."""
        group_by, found, group, is_global = self.spec.group_by, self.found, self.question.group, self.question.is_global
        key = self._key(measure)
        if len(found) > 1:
            _require_disjoint(found, measure)
        aggregate = self._aggregate(key)
        if aggregate is None:
            empty = measure.stack(None)
            if group_by and not is_global:
                if group is not None and len(group) == len(group_by):
                    raise _no_group(group, found)
                return empty, []
            if not is_global:
                return merge_groups(empty), None
            rests = self._rests()
            return rests.merged(measure, rests.stack_without_data(measure)), None
        stack = aggregate.measures[measure.name]
        if is_global:
            return self.synopses.get((key, "all"), lambda: self._rests().merged(measure, stack)), None
        if not group_by:
            return (stack if len(stack) == 1 else merge_groups(stack)), None
        if group is not None and len(group) == len(group_by):
            # Cached per window and group: finding a group scans all keys.
            named = repr(sorted(group.items()))
            return self.synopses.get((key, named), lambda: _only(stack, aggregate, group, found)), None
        spend(cells=len(aggregate))
        codes = sorted_groups(aggregate, np.arange(len(aggregate))) if group is None else _chosen(aggregate, group)
        rows = zip(*(c.to_pylist() for c in aggregate.rows(codes)), strict=True)
        groups: list[Group] = [dict(zip(aggregate.key_names, row, strict=True)) for row in rows]
        return stack.take(codes), groups

    def _aggregate(self, key: tuple[Any, ...]) -> GroupedAggregate | None:
        if len(self.found) == 1:
            return self.windows.aggregate(self.found[0])
        return self.synopses.get((key, "windows"), self._merged)

    def _merged(self) -> GroupedAggregate | None:
        """Returns the union of the data of the windows. Few windows are in memory at the same time."""
        merged: GroupedAggregate | None = None
        for at in range(0, len(self.found), MERGED_AT_ONCE):
            spend()
            page = self.found[at : at + MERGED_AT_ONCE]
            parts = [a for a in map(self.windows.aggregate, page) if a is not None]
            parts = parts if merged is None else [merged, *parts]
            merged = parts[0].merge_many(parts[1:]) if len(parts) > 1 else next(iter(parts), None)
        return merged

    def _other(self) -> tuple[Stack, Sequence[AnswerRecord], QuerySpec]:
        """Returns the second synopsis of a question about two, its windows (with the same bounds), and its query."""
        second = self.question.second
        if second is None:
            accepted = '{"query": …, "measure": …}'
            raise InvalidRequest("with", None, accepted, f"{self.question.name} is about two synopses")
        there = self.windows.for_query(second.query)
        theirs = [_same_window(there, w, second) for w in self.found]
        other_question, spec = self.question.of_second(), there.spec
        other = _measure(other_question, spec, "with.measure")
        _check_group(other_question, spec, "with.group")
        stack, _ = _Line(there, self.synopses, other_question, other, theirs)._stack(other)
        if second.group is not None and len(second.group) != len(spec.group_by):
            accepted = f"all of {', '.join(spec.group_by)}, or no group to merge all groups"
            raise InvalidRequest("with.group", second.group, accepted)
        return stack, theirs, spec


@dataclass(frozen=True, slots=True)
class _StackAnswer:
    """Evaluates one question on a stack.

    Attributes:
        groups: groups of the stack; None: it is one synopsis, of all groups or of the selected one.
        widen: widens intervals by the records that the stack lacks.
        confidence: of the interval of a function of a sample.
    """

    measure: Measure
    question: QuestionLine
    stack: Stack
    groups: list[Group] | None
    widen: MeasureWidening
    confidence: float

    def to_json(self, arguments: Arguments) -> Document:
        question, stack, name = self.question, self.stack, self.measure.name
        if question.name == "top":
            return self._ranked(arguments)
        if question.name is None and self.measure.function.sample is not None:
            values = FunctionValues.of(self.measure, stack, self.confidence, lambda e: self.widen(stack, e, None))
            return self._rows(values.parts(), stack.kind)
        try:
            if question.name is None:
                kind = self.measure.question or default_question(stack, question.confidence)
            else:
                kind = parse_question(question.name, arguments, stack, question.confidence, measure=name)
            estimates = self.widen(stack, evaluate_question(stack, kind, question.confidence, measure=name), kind)
        except IncompatibleSynopses as exc:
            # The cause is the user's choice of measures, not the stored bytes.
            accepted = "a measure with equal parameters and seed"
            raise InvalidRequest("with", question.second and question.second.description, accepted, str(exc)) from exc
        whole = isinstance(kind, INTEGER_QUESTIONS) or (kind is None and shows_integers(stack))
        return self._rows([IntervalPart("", estimates, whole)], estimates.basis)

    def _rows(self, parts: Sequence[Part], basis: str) -> Document:
        column = CellColumn(self.measure.name, parts, OwnError())
        cells, stated = column.cells(len(self.stack)), {"confidence": column.confidence, "basis": basis}
        if self.groups is None:
            return {**cells[0], **stated}
        each = zip(self.groups, cells, strict=True)
        return {"data": [{"group": _json_group(g), **cell} for g, cell in each], **stated}

    def _ranked(self, arguments: Arguments) -> Document:
        name = self.measure.name
        if not isinstance(self.stack, ItemRanking):
            parse_question("top", arguments, self.stack, measure=name)  # raises, and names the possible questions
            raise AssertionError
        asked = top_items_question(self.stack, arguments.get("k"), name)
        ranked = self.stack.top(asked)
        require_confidence(ranked.frequencies, self.question.confidence, name)
        estimates = self.widen(self.stack, ranked.frequencies, asked or TopItems(1), ranked.groups)
        return self._rows([ListPart("top", ranked.groups, {"item": ranked.items}, estimates, True)], estimates.basis)


def data_key(record: AnswerRecord) -> tuple[str, int, int, int]:
    """Returns the cache key of the data of an answer, which never change. A correction has another answer's data."""
    return record.query.name, record.query.version, record.window_start_ms, record.data_of or record.revision


def _measure(question: QuestionLine, spec: QuerySpec, field: str = "measure") -> Measure:
    shown = {m.name: m for m in spec.measures if not m.part_of}
    if question.measure is None and len(shown) == 1:
        return next(iter(shown.values()))
    if question.measure not in shown:
        derived = any(value.name == question.measure for value in spec.derived)
        reason = "it is derived and has no synopsis; answers and roll-ups have its value" if derived else ""
        raise InvalidRequest(field, question.measure, f"one of {', '.join(shown)}", reason)
    return shown[question.measure]


def _check_group(question: QuestionLine, spec: QuerySpec, field: str = "group") -> None:
    for column in question.group or ():
        if column not in spec.group_by:
            columns = ", ".join(spec.group_by) or f"(none: {spec.name} is not grouped)"
            raise InvalidRequest(f"{field}.{column}", (question.group or {})[column], f"one of the columns {columns}")
    if question.group is not None and question.is_global:
        raise InvalidRequest(field, question.group, "a group, or global: true, not both")


def _chosen(aggregate: GroupedAggregate, group: Group) -> Any:
    """Codes of the groups with these values. Raises InvalidRequest for a value of another type."""
    keep = np.ones(len(aggregate), bool)
    for name, column in zip(aggregate.key_names, aggregate.rows(), strict=True):
        if name not in group:
            continue
        value = group[name]
        if value is None:
            keep &= column.is_null().to_numpy(zero_copy_only=False)
            continue
        if pa.types.is_floating(column.type) and value in NOT_FINITE:
            floats = column.to_numpy(zero_copy_only=False)
            keep &= (
                np.isnan(floats) & column.is_valid().to_numpy(zero_copy_only=False)
                if value == "NaN"
                else floats == float(value)
            )
            continue
        try:
            if isinstance(value, bool) != pa.types.is_boolean(column.type):
                raise pa.ArrowTypeError("a boolean does not equal another type")
            wanted = pa.scalar(value, column.type)
        except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, OverflowError):
            raise InvalidRequest(f"group.{name}", value, f"a value of type {column.type}, or null") from None
        keep &= pc.fill_null(pc.equal(column, wanted), False).to_numpy(zero_copy_only=False)
    return sorted_groups(aggregate, np.flatnonzero(keep))


def _only(stack: Stack, aggregate: GroupedAggregate, group: Group, found: Sequence[AnswerRecord]) -> Stack:
    """The stack of the one group with these values. Raises NotFound, InvalidRequest."""
    codes = _chosen(aggregate, group)
    if not len(codes):
        raise _no_group(group, found)
    return stack.take(codes[:1])


def _no_group(group: Group, found: Sequence[AnswerRecord]) -> NotFound:
    return NotFound(f"no record of the group {dict(group)} in the window at {rfc3339(found[0].window_start_ms)}")


def _require_disjoint(found: Sequence[AnswerRecord], measure: Measure) -> None:
    overlap = any(b.window_start_ms < a.window_end_ms for a, b in pairwise(found))
    if overlap and not measure.stack(None).properties.idempotent:
        accepted = "false, or windows that do not overlap, or an idempotent measure"
        reason = f"the windows overlap, and {measure.name} would count their common records twice"
        raise InvalidRequest("merge", True, accepted, reason)


def _same_window(there: AnsweredWindows, window: AnswerRecord, second: SecondSynopsis) -> AnswerRecord:
    theirs = there.starting(window.window_start_ms)
    if theirs is None:
        raise NotFound(
            f"query {second.query}: no window that starts at {rfc3339(window.window_start_ms)} has an answer"
        )
    if theirs.window_end_ms != window.window_end_ms:
        reason = f"its window ends at {rfc3339(theirs.window_end_ms)}, not at {rfc3339(window.window_end_ms)}"
        raise InvalidRequest("with.query", second.query, "a query with the same windows", reason)
    return theirs


def _json_group(group: Group) -> Group:
    return {name: plain_key(value) for name, value in group.items()}

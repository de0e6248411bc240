"""Evaluates questions on answered windows: the latest, those at a time, or one by its start (Condor, section 6).

Pure: takes a question and a source of windows (`AnsweredWindows`), returns JSON lines. A global question merges the
groups' synopses, a stratified one selects a group; otherwise there is an answer per group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from center.serving.function_values import FunctionValues, function_confidence
from center.serving.predictions import RecordsOut
from center.serving.question_lines import Arguments, SecondSynopsis, WindowQuestion, WindowSelector
from center.serving.render import sorted_groups
from center.serving.synopsis_cache import SynopsisCache
from center.serving.totals import Rests
from center.serving.widening import Lacking, Widening
from center.serving.withheld import GroupsWithheld, of_all_groups, record_count
from edgewater.answers import Facts, Phase, Predicted
from edgewater.answers.cells import Column, IntervalPart, ListPart, Part
from edgewater.answers.own_error import OwnError
from edgewater.answers.statement import completeness
from edgewater.answers.uniting import union_of_windows, united, united_rests
from edgewater.answers.work import spend
from edgewater.model.errors import IncompatibleSynopses, InvalidRequest, NotFound
from edgewater.model.json_types import Document, Group, Json
from edgewater.model.key_texts import NOT_FINITE
from edgewater.model.measure import Measure
from edgewater.model.query import QuerySpec
from edgewater.model.table_texts import plain_key
from edgewater.model.timestamps import rfc3339
from edgewater.model.windows import TimeWindow
from edgewater.synopses import (
    Estimates,
    GroupedAggregate,
    IntArray,
    ItemRanking,
    Question,
    Stack,
    TopItems,
)
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

MERGED_AT_ONCE = 10
"""Windows whose data are merged between two looks at the budget of the request."""


@dataclass(frozen=True, slots=True)
class WindowAnswer:
    """The newest answer to a window.

    Attributes:
        key: cache key of the immutable synopsis bytes.
    """

    key: tuple[Any, ...]
    start_ms: int
    end_ms: int
    phase: Phase
    revision: int
    facts: Facts


class AnsweredWindows(Protocol):
    """The answered windows of one query."""

    @property
    def spec(self) -> QuerySpec: ...

    def latest(self, count: int) -> Sequence[WindowAnswer]:
        """The last `count` windows with an answer (or fewer), ascending."""

    def at(self, time_ms: int) -> Sequence[WindowAnswer]:
        """Every window that contains the time, ascending."""

    def starting(self, start_ms: int) -> WindowAnswer | None:
        """The window with this start."""

    def aggregate(self, window: WindowAnswer) -> GroupedAggregate | None:
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

    def answer(self, question: WindowQuestion) -> Iterator[Document]:
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
            is_empty = self._is_empty(question.selector)
            why = "is closed by all edges without a record, so it has no answer" if is_empty else "has an answer"
            which = "the window" if is_empty else "no window"
            raise NotFound(f"query {spec.name}: {which} {question.selector.description} {why}")
        if question.merge:
            yield self._answer_line(question, measure, found)
        else:
            for window in found:
                yield self._answer_line(question, measure, [window])

    def _find(self, question: WindowQuestion) -> Sequence[WindowAnswer]:
        if question.selector.latest is not None:
            return self.windows.latest(question.selector.latest)
        if question.selector.at_ms is not None:
            return self.windows.at(question.selector.at_ms)
        assert question.selector.start_ms is not None
        window = self.windows.starting(question.selector.start_ms)
        return [] if window is None else [window]

    def _is_empty(self, selector: WindowSelector) -> bool:
        """Returns whether a selected window has no answer because it is empty."""
        window, time_ms = self.windows.spec.window, selector.start_ms if selector.at_ms is None else selector.at_ms
        if not isinstance(window, TimeWindow) or time_ms is None:
            return False
        start_ms = window.slice_start(time_ms) if selector.start_ms is None else time_ms
        return bool(self.windows.empty([(start_ms, window.end(start_ms))]))

    def _answer_line(self, question: WindowQuestion, measure: Measure, found: Sequence[WindowAnswer]) -> Document:
        spec = self.windows.spec
        stack, groups = self._stack(measure, found, question.group, question.is_global)
        head = _head(question, spec, measure, found)
        windows, arguments = list(found), question.arguments
        withheld = self._withheld(question, measure, found, groups)
        if question.name in BINARY_QUESTIONS:
            other, theirs, there = self._other(question, measure, found)
            arguments = {**arguments, "other": other}
            windows += theirs
            more = GroupsWithheld.of(there, union_of_windows(there, [w.facts.withheld for w in theirs]))
            withheld = withheld.beside(more)
        # A function of a sample takes long and does not change its stack, so it needs no lock.
        computed = question.name is None and measure.function.sample is not None
        with nullcontext() if computed else self.synopses.exclusively():
            widening = self._widening(question, measure, windows, stack, groups, withheld)
            confidence = function_confidence(spec, measure, len(stack), question.confidence)
            answer = _StackAnswer(measure, question, stack, groups, widening, confidence)
            return {**head, **answer.to_json(arguments)}

    def _widening(
        self,
        question: WindowQuestion,
        measure: Measure,
        windows: Sequence[WindowAnswer],
        stack: Stack,
        groups: list[Group] | None,
        withheld: GroupsWithheld,
    ) -> Widening:
        """Returns how to widen the intervals of a stack that was merged from the data of some windows."""
        spec = self.windows.spec
        of_all_groups = bool(spec.group_by) and (question.is_global or question.name in BINARY_QUESTIONS)
        keys = {} if of_all_groups else _key_columns(spec.group_by, question, groups)
        predicted: Predicted | None = None
        out = None
        if any(w.facts.predicted is not None for w in windows):
            # Predictions of several windows or groups cannot be added, so nothing is stated of their sum.
            several = len(windows) > 1 or of_all_groups
            predicted = Predicted() if several else windows[0].facts.predicted or Predicted()
            out = self._records_out(question, measure, windows, stack, keys, predicted)
        lacking = Lacking.of([w.facts for w in windows], keys, len(stack))
        return Widening(keys, withheld, lacking, predicted, out)

    def _records_out(
        self,
        question: WindowQuestion,
        measure: Measure,
        windows: Sequence[WindowAnswer],
        stack: Stack,
        keys: Mapping[str, pa.Array],
        predicted: Predicted,
    ) -> RecordsOut | None:
        """Returns the records that may be out of an early answer's synopsis; None: it is not known how many."""
        spec, count = self.windows.spec, record_count(self.windows.spec)
        if measure.name != predicted.measure or spec.accuracy is None or spec.accuracy.measure != measure.name:
            return None
        stacks = {measure.name: stack}
        if count is not None:
            stacks[count.name] = self._stack(count, windows, question.group, question.is_global)[0]
        return RecordsOut.of(spec, predicted, keys, stacks)

    def _withheld(
        self,
        question: WindowQuestion,
        measure: Measure,
        found: Sequence[WindowAnswer],
        groups: list[Group] | None,
    ) -> GroupsWithheld:
        """What edges withhold of the groups that a question selects."""
        spec = self.windows.spec
        bounds = union_of_windows(spec, [w.facts.withheld for w in found])
        if question.is_global:
            rests, aggregate = _rests(spec, found), self._aggregate(found, (tuple(w.key for w in found), measure.name))
            stack = rests.stack_without_data(measure) if aggregate is None else aggregate.measures[measure.name]
            missing = rests.missing(measure, stack)
            if missing is not None:
                return GroupsWithheld.of_records(spec, missing)
            bounds = of_all_groups(spec, bounds) if spec.group_by else bounds
        withheld, count = GroupsWithheld.of(spec, bounds), record_count(spec)
        if bounds and not question.is_global:
            keys = _key_columns(spec.group_by, question, groups)
            withheld = withheld.of_edges(keys, united([w.facts for w in found], spec).edges)
        if count is None or not bounds or (measure.function.error is not None and _is_own(question, measure)):
            return withheld
        counts, _ = self._stack(count, found, question.group, question.is_global)
        return replace(withheld, sent=counts.query().value)

    def _stack(
        self, measure: Measure, found: Sequence[WindowAnswer], group: Group | None, is_global: bool
    ) -> tuple[Stack, list[Group] | None]:
        """The stack to evaluate and its groups; None: it is one synopsis, of all groups or of the selected one."""
        spec = self.windows.spec
        key = (tuple(w.key for w in found), measure.name)
        if len(found) > 1:
            _require_disjoint(found, measure)
        aggregate = self._aggregate(found, key)
        if aggregate is None:
            empty = measure.stack(None)
            if spec.group_by and not is_global:
                if group is not None and len(group) == len(spec.group_by):
                    raise _no_group(group, found)
                return empty, []
            if not is_global:
                return merge_groups(empty), None
            rests = _rests(spec, found)
            return rests.merged(measure, rests.stack_without_data(measure)), None
        stack = aggregate.measures[measure.name]
        if is_global:
            return self.synopses.get((key, "all"), lambda: _rests(spec, found).merged(measure, stack)), None
        if not spec.group_by:
            return (stack if len(stack) == 1 else merge_groups(stack)), None
        if group is not None and len(group) == len(spec.group_by):
            # Cached per window and group: finding a group scans all keys.
            named = repr(sorted(group.items()))
            return self.synopses.get((key, named), lambda: _only(stack, aggregate, group, found)), None
        spend(cells=len(aggregate))
        codes = sorted_groups(aggregate, np.arange(len(aggregate))) if group is None else _chosen(aggregate, group)
        rows = zip(*(c.to_pylist() for c in aggregate.rows(codes)), strict=True)
        groups: list[Group] = [dict(zip(aggregate.key_names, row, strict=True)) for row in rows]
        return stack.take(codes), groups

    def _aggregate(self, found: Sequence[WindowAnswer], key: tuple[Any, ...]) -> GroupedAggregate | None:
        if len(found) == 1:
            return self.windows.aggregate(found[0])
        return self.synopses.get((key, "windows"), lambda: self._merged(found))

    def _merged(self, found: Sequence[WindowAnswer]) -> GroupedAggregate | None:
        """Returns the union of the data of windows. Few windows are in memory at the same time."""
        merged: GroupedAggregate | None = None
        for at in range(0, len(found), MERGED_AT_ONCE):
            spend()
            parts = [a for a in map(self.windows.aggregate, found[at : at + MERGED_AT_ONCE]) if a is not None]
            parts = parts if merged is None else [merged, *parts]
            merged = parts[0].merge_many(parts[1:]) if len(parts) > 1 else next(iter(parts), None)
        return merged

    def _other(
        self, question: WindowQuestion, measure: Measure, found: Sequence[WindowAnswer]
    ) -> tuple[Stack, Sequence[WindowAnswer], QuerySpec]:
        """Returns the second synopsis of a question about two, its windows (with the same bounds), and its query."""
        if question.second is None:
            raise InvalidRequest("with", None, '{"query": …, "measure": …}', f"{question.name} is about two synopses")
        there = self.windows.for_query(question.second.query)
        theirs = [_same_window(there, w, question.second) for w in found]
        other_question = question.of_second()
        other = _measure(other_question, there.spec, "with.measure")
        _check_group(other_question, there.spec, "with.group")
        stack, _ = Evaluator(there, self.synopses)._stack(
            other, theirs, other_question.group, other_question.group is None
        )
        if other_question.group is not None and len(other_question.group) != len(there.spec.group_by):
            accepted = f"all of {', '.join(there.spec.group_by)}, or no group to merge all groups"
            raise InvalidRequest("with.group", other_question.group, accepted)
        return stack, theirs, there.spec


@dataclass(frozen=True, slots=True)
class _StackAnswer:
    """Evaluates one question on a stack.

    Attributes:
        groups: groups of the stack; None: it is one synopsis, of all groups or of the selected one.
        widening: widens intervals by the records that the stack lacks.
        confidence: of the interval of a function of a sample.
    """

    measure: Measure
    question: WindowQuestion
    stack: Stack
    groups: list[Group] | None
    widening: Widening
    confidence: float

    def to_json(self, arguments: Arguments) -> Document:
        question, stack, name = self.question, self.stack, self.measure.name
        if question.name == "top":
            return self._ranked(arguments)
        if question.name is None and self.measure.function.sample is not None:
            values = FunctionValues.of(self.measure, stack, self.confidence, lambda e: self._widened(e, None))
            return self._rows(values.parts(), stack.kind)
        try:
            if question.name is None:
                kind = self.measure.question or default_question(stack, question.confidence)
            else:
                kind = parse_question(question.name, arguments, stack, question.confidence, measure=name)
            estimates = self._widened(evaluate_question(stack, kind, question.confidence, measure=name), kind)
        except IncompatibleSynopses as exc:
            # The cause is the user's choice of measures, not the stored bytes.
            raise InvalidRequest(
                "with",
                question.second and question.second.description,
                "a measure with equal parameters and seed",
                str(exc),
            ) from exc
        whole = isinstance(kind, INTEGER_QUESTIONS) or (kind is None and shows_integers(stack))
        return self._rows([IntervalPart("", estimates, whole)], estimates.basis)

    def _rows(self, parts: Sequence[Part], basis: str) -> Document:
        column = Column(self.measure.name, parts, OwnError())
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
        estimates = self._widened(ranked.frequencies, asked or TopItems(1), ranked.groups)
        return self._rows([ListPart("top", ranked.groups, {"item": ranked.items}, estimates, True)], estimates.basis)

    def _widened(self, estimates: Estimates, kind: Question | None, groups: IntArray | None = None) -> Estimates:
        """Widens intervals by the records that the windows lack.

        Args:
            groups: the row of each estimate; None: there is one per row.
        """
        return self.widening.widen(
            self.measure, self.stack, estimates, kind, groups, own=_is_own(self.question, self.measure)
        )


def _key_columns(group_by: Sequence[str], question: WindowQuestion, groups: list[Group] | None) -> dict[str, pa.Array]:
    """Returns the key columns of the groups; None: of the group that the question selects."""
    rows = [question.group or {}] if groups is None else groups
    return {name: pa.array([row[name] for row in rows]) for name in group_by}


def _rests(spec: QuerySpec, found: Sequence[WindowAnswer]) -> Rests:
    return Rests(united_rests(spec, [window.facts.rests for window in found]))


def _is_own(question: WindowQuestion, measure: Measure) -> bool:
    """Whether a question is about the measure's own value. Amounts of a sum do not bound the answers to other
    questions."""
    return question.name in (None, measure.function.name)


def _measure(question: WindowQuestion, spec: QuerySpec, field: str = "measure") -> Measure:
    names = [m.name for m in spec.measures]
    if question.measure is None and len(names) == 1:
        return spec.measures[0]
    if question.measure not in names:
        raise InvalidRequest(field, question.measure, f"one of {', '.join(names)}")
    return spec.measures[names.index(question.measure)]


def _check_group(question: WindowQuestion, spec: QuerySpec, field: str = "group") -> None:
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


def _only(stack: Stack, aggregate: GroupedAggregate, group: Group, found: Sequence[WindowAnswer]) -> Stack:
    """The stack of the one group with these values. Raises NotFound, InvalidRequest."""
    codes = _chosen(aggregate, group)
    if not len(codes):
        raise _no_group(group, found)
    return stack.take(codes[:1])


def _no_group(group: Group, found: Sequence[WindowAnswer]) -> NotFound:
    return NotFound(f"no record of the group {dict(group)} in the window at {rfc3339(found[0].start_ms)}")


def _require_disjoint(found: Sequence[WindowAnswer], measure: Measure) -> None:
    overlap = any(b.start_ms < a.end_ms for a, b in pairwise(found))
    if overlap and not measure.stack(None).properties.idempotent:
        raise InvalidRequest(
            "merge",
            True,
            "false, or windows that do not overlap, or an idempotent measure",
            f"the windows overlap, and {measure.name} would count their common records twice",
        )


def _same_window(there: AnsweredWindows, window: WindowAnswer, second: SecondSynopsis) -> WindowAnswer:
    theirs = there.starting(window.start_ms)
    if theirs is None:
        raise NotFound(f"query {second.query}: no window that starts at {rfc3339(window.start_ms)} has an answer")
    if theirs.end_ms != window.end_ms:
        reason = f"its window ends at {rfc3339(theirs.end_ms)}, not at {rfc3339(window.end_ms)}"
        raise InvalidRequest("with.query", second.query, "a query with the same windows", reason)
    return theirs


def _json_group(group: Group) -> Group:
    return {name: plain_key(value) for name, value in group.items()}


def _head(question: WindowQuestion, spec: QuerySpec, measure: Measure, found: Sequence[WindowAnswer]) -> Document:
    """The members of a line besides its values. Merged windows have the least advanced phase and all revisions."""
    first = found[0]
    head: dict[str, Json] = {"id": question.id, "query": spec.name, "measure": measure.name}
    if question.name is not None:
        head["question"] = question.name
    if question.group is not None:
        head["group"] = dict(question.group)
    head["window"] = {"start": rfc3339(first.start_ms), "end": rfc3339(max(w.end_ms for w in found))}
    head["phase"] = min((w.phase for w in found), key=lambda phase: phase.rank).value
    if not question.merge:
        return {**head, "revision": first.revision, "completeness": completeness(first.facts)}
    head["windows"] = [{"start": rfc3339(w.start_ms), "revision": w.revision} for w in found]
    return {**head, "completeness": completeness(united([w.facts for w in found], spec))}

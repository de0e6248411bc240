"""Evaluation (Condor, section 6): questions to windows — the latest, those at a time, or one by its start.

Pure: a question and where windows can be read (`AnsweredWindows`) go in, lines of an answer come out. No HTTP and no
store, so that the query tier and Spark's operators share it. Global questions merge the groups' synopses,
stratified ones choose a group, and with neither there is an answer per group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from center.serving.cells import intervals, plain
from center.serving.function_values import FunctionPart, function_confidence
from center.serving.measures import widen_by_withheld
from center.serving.question_lines import SecondSynopsis, WindowQuestion
from center.serving.render import rfc3339, sorted_groups, with_prediction
from center.serving.synopsis_cache import SynopsisCache
from edgewater.errors import IncompatibleSynopses, InvalidRequest, NotFound
from edgewater.measure import Measure
from edgewater.query import QuerySpec
from edgewater.synopses.base import Estimates, Stack
from edgewater.synopses.grouped import GroupedAggregate
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
from edgewater.synopses.questions import Ranking
from edgewater.synopses.sampling.row_sample import RowSampleStack

_PHASES = ("early", "complete", "final")
_WHOLE = ("count", "integer_sum")


@dataclass(frozen=True, slots=True)
class WindowAnswer:
    """The newest answer to a window.

    Attributes:
        key: identifies its bytes for ever, for caches.
        phase: "early", "complete" or "final".
        completeness: as in an answer's quality.
        withheld: what edges hold back, per measure, as in an answer's quality.
        prediction: of a query with an accuracy, what the window is expected to come to; None: its data say it.
    """

    key: tuple[Any, ...]
    start_ms: int
    end_ms: int
    phase: str
    revision: int
    completeness: Mapping[str, Any]
    withheld: Mapping[str, Any]
    prediction: Mapping[str, Any] | None = None


class AnsweredWindows(Protocol):
    """The answered windows of one query, as somebody stores them."""

    @property
    def spec(self) -> QuerySpec: ...

    def latest(self, count: int) -> Sequence[WindowAnswer]:
        """The last `count` windows that have an answer, ascending; fewer if there are not so many."""

    def at(self, time_ms: int) -> Sequence[WindowAnswer]:
        """Every window that contains the time, ascending."""

    def starting(self, start_ms: int) -> WindowAnswer | None:
        """The window that starts then."""

    def aggregate(self, window: WindowAnswer) -> GroupedAggregate | None:
        """The window's synopses; None: no edge had data."""

    def of(self, query: str) -> AnsweredWindows:
        """Those of another query. Raises NotFound."""


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Answers questions about one query's windows.

    Attributes:
        synopses: holds what is synopses and merge_groups, so that many questions on a window cost that once.
    """

    windows: AnsweredWindows
    synopses: SynopsisCache

    def answer(self, line: WindowQuestion) -> Iterator[dict[str, Any]]:
        """One line per window, or one in all with `merge`; lazily, so that a reader who leaves stops the work.

        Raises:
            InvalidRequest: a measure, group or question that does not fit; a merge of windows that overlap.
            NotFound: no such window has an answer, or it has no such group.
            SynopsisError: stored bytes cannot be read.
        """
        spec = self.windows.spec
        measure = _measure(line, spec)
        _check_group(line, spec)
        found = self._find(line)
        if not found:
            raise NotFound(f"query {spec.name}: no window {line.target.shown} has an answer")
        if line.merge:
            yield self._line(line, measure, found)
        else:
            for window in found:
                yield self._line(line, measure, [window])

    def _find(self, line: WindowQuestion) -> Sequence[WindowAnswer]:
        if line.target.latest is not None:
            return self.windows.latest(line.target.latest)
        if line.target.at_ms is not None:
            return self.windows.at(line.target.at_ms)
        assert line.target.start_ms is not None
        window = self.windows.starting(line.target.start_ms)
        return [] if window is None else [window]

    def _line(self, line: WindowQuestion, measure: Measure, found: Sequence[WindowAnswer]) -> dict[str, Any]:
        spec = self.windows.spec
        stack, groups = self._stack(measure, found, line.group, line.is_global)
        head = _head(line, spec, measure, found)
        withheld, predictions = [w.withheld for w in found], [w.prediction for w in found]
        given = line.given
        if line.question in BINARY_QUESTIONS:
            other, theirs = self._other(line, measure, found)
            given = {**given, "other": other}
            withheld += [w.withheld for w in theirs]
            predictions += [w.prediction for w in theirs]
        of_all_groups = bool(spec.group_by) and line.is_global
        # A function of a sample takes long, and changes nothing in its stack.
        computed = line.question is None and measure.function.sample is not None
        with nullcontext() if computed else self.synopses.using():
            answer = _StackAnswer(
                measure, line, stack, spec.group_by, groups, withheld, predictions, of_all_groups,
                _reports_withheld_records(spec), function_confidence(spec, measure, len(stack), line.confidence),
            )  # fmt: skip
            return {**head, **answer.shown(given)}

    def _stack(
        self, measure: Measure, found: Sequence[WindowAnswer], group: Mapping[str, Any] | None, is_global: bool
    ) -> tuple[Stack, list[dict[str, Any]] | None]:
        """The synopses asked, and the groups they are of; None: it is one, of all or of the group chosen."""
        spec = self.windows.spec
        key = (tuple(w.key for w in found), measure.name)
        if len(found) > 1:
            _require_disjoint(found, measure)
        aggregate = self._aggregate(found, key)
        if aggregate is None:
            empty = measure.function.make(measure.parameters, None)
            if spec.group_by and not is_global:
                if group is not None and len(group) == len(spec.group_by):
                    raise _no_group(group, found)
                return empty, []
            empty.grow(1)
            return empty, None
        stack = aggregate.measures[measure.name]
        if is_global or not spec.group_by:
            if len(stack) == 1:
                return stack, None
            return self.synopses.get((key, "all"), lambda: merge_groups(stack)), None
        if group is not None and len(group) == len(spec.group_by):
            # Looked for once per window and group: to find it is to read all keys.
            named = repr(sorted(group.items()))
            return self.synopses.get((key, named), lambda: _only(stack, aggregate, group, found)), None
        codes = sorted_groups(aggregate) if group is None else _chosen(aggregate, group)
        rows = zip(*(c.to_pylist() for c in aggregate.rows(codes)), strict=True)
        groups = [dict(zip(aggregate.key_names, row, strict=True)) for row in rows]
        return stack.take(codes), groups

    def _aggregate(self, found: Sequence[WindowAnswer], key: tuple[Any, ...]) -> GroupedAggregate | None:
        if len(found) == 1:
            return self.windows.aggregate(found[0])
        parts = [a for a in map(self.windows.aggregate, found) if a is not None]
        if len(parts) < 2:
            return parts[0] if parts else None
        return self.synopses.get((key, "windows"), lambda: parts[0].merge_many(parts[1:]))

    def _other(
        self, line: WindowQuestion, measure: Measure, found: Sequence[WindowAnswer]
    ) -> tuple[Stack, Sequence[WindowAnswer]]:
        """The second synopsis of a question about two, and its windows, which are the same."""
        if line.partner is None:
            raise InvalidRequest("with", None, '{"query": …, "measure": …}', f"{line.question} is about two synopses")
        there = self.windows.of(line.partner.query)
        theirs = [_same_window(there, w, line.partner) for w in found]
        other_line = line.of_partner()
        other = _measure(other_line, there.spec, "with.measure")
        _check_group(other_line, there.spec, "with.group")
        stack, _ = Evaluator(there, self.synopses)._stack(other, theirs, other_line.group, other_line.group is None)
        if other_line.group is not None and len(other_line.group) != len(there.spec.group_by):
            accepted = f"all of {', '.join(there.spec.group_by)}, or no group, for all of them together"
            raise InvalidRequest("with.group", other_line.group, accepted)
        return stack, theirs


@dataclass(frozen=True, slots=True)
class _StackAnswer:
    """What a stack says to a line.

    Attributes:
        groups: that the stack is of; None: it is one, of all or of the group chosen.
        withheld: per window, what edges state.
        predictions: per window, what it is expected to come to.
        reports_withheld_records: whether it would say so if records of any value were withheld.
        confidence: of the interval of a function of a sample.
    """

    measure: Measure
    line: WindowQuestion
    stack: Stack
    group_by: Sequence[str]
    groups: list[dict[str, Any]] | None
    withheld: Sequence[Mapping[str, Any]]
    predictions: Sequence[Mapping[str, Any] | None]
    of_all_groups: bool
    reports_withheld_records: bool
    confidence: float

    def shown(self, given: Mapping[str, Any]) -> dict[str, Any]:
        line, stack, name = self.line, self.stack, self.measure.name
        if line.question == "top":
            return self._ranked(given)
        if line.question is None and isinstance(stack, RowSampleStack) and self.measure.function.sample is not None:
            part = FunctionPart.of(self.measure, stack, self.confidence, self._widened)
            return self._rows(part.cells(len(stack)), self.confidence, stack.kind)
        try:
            if line.question is None:
                kind = default_question(stack, line.confidence)
            else:
                kind = parse_question(line.question, given, stack, line.confidence, measure=name)
            estimates = self._widened(evaluate_question(stack, kind, line.confidence, measure=name))
        except IncompatibleSynopses as exc:
            # Of what the user chose to compare, not of stored bytes.
            raise InvalidRequest("with", line.partner and line.partner.shown, "a measure made alike", str(exc)) from exc
        whole = isinstance(kind, INTEGER_QUESTIONS) or (kind is None and stack.kind in _WHOLE)
        return self._rows(intervals(estimates, whole), estimates.confidence, estimates.basis)

    def _rows(self, cells: Sequence[Mapping[str, Any]], confidence: float, basis: str) -> dict[str, Any]:
        stated = {"confidence": confidence, "basis": basis}
        if self.groups is None:
            return {**cells[0], **stated}
        return {"data": [{"group": _shown(g), **cell} for g, cell in zip(self.groups, cells, strict=True)], **stated}

    def _ranked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        name, groups = self.measure.name, self.groups
        if not isinstance(self.stack, Ranking):
            parse_question("top", given, self.stack, measure=name)  # raises: it says what can be asked
            raise AssertionError
        ranked = self.stack.top(top_items_question(self.stack, given.get("k"), name))
        require_confidence(ranked.frequencies, self.line.confidence, name)
        estimates = self._widened(ranked.frequencies)
        entries = [
            {"item": plain(item), **cell}
            for item, cell in zip(ranked.items.to_pylist(), intervals(estimates, True), strict=True)
        ]
        stated = {"confidence": estimates.confidence, "basis": estimates.basis}
        if groups is None:
            return {"top": entries, **stated}
        ends = np.searchsorted(ranked.groups, np.arange(len(groups) + 1)).tolist()
        data = [{"group": _shown(g), "top": entries[ends[i] : ends[i + 1]]} for i, g in enumerate(groups)]
        return {"data": data, **stated}

    def _predicted(self, estimates: Estimates, own: bool) -> Estimates:
        """What windows come to of which records are out, as the answer has it; of anything else nobody knows it."""
        if len(self.predictions) > 1 or not own or self.of_all_groups:
            return with_prediction(estimates, self.measure, {}, {})
        rows = [self.line.group or {}] if self.groups is None else self.groups
        keys = {name: pa.array([row[name] for row in rows]) for name in self.group_by}
        return with_prediction(estimates, self.measure, self.predictions[0] or {}, keys)

    def _widened(self, estimates: Estimates) -> Estimates:
        """Room for what edges withhold; over several windows it adds up, of extrema the largest holds."""
        held = [w for w in self.withheld if w]
        # The bounds of a sum say nothing of how many records are missing from it, which its stack is asked too.
        own = self.line.question in (None, self.measure.function.name)
        if any(p is not None for p in self.predictions):
            return self._predicted(estimates, own)
        if not held and (own or self.reports_withheld_records):
            return estimates
        bounds = [b for w in held if (b := w.get(self.measure.name)) is not None]
        if not own or self.measure.function.error is None or (self.of_all_groups and bounds):
            # A bound is per group: nobody knows how many groups it may have been reached in.
            unknown = np.full(len(estimates), np.nan)
            return Estimates(estimates.value, unknown, unknown, estimates.confidence, estimates.basis)
        if not bounds:
            return estimates
        fold = sum if self.measure.function.error == "sum" else max
        total = {
            side: None if any(b[side] is None for b in bounds) else fold([b[side] for b in bounds])
            for side in ("above", "below")
        }
        return widen_by_withheld(estimates, self.measure, {self.measure.name: total})


def _reports_withheld_records(spec: QuerySpec) -> bool:
    """Whether edges that withhold a record always state something: a sum may be withheld at no error, of zeros."""
    if spec.budget is None or spec.accuracy is not None:
        return True
    return any(m.function.error is None or (m.function.name == "count" and m.argument is None) for m in spec.measures)


def _measure(line: WindowQuestion, spec: QuerySpec, field: str = "measure") -> Measure:
    names = [m.name for m in spec.measures]
    if line.measure is None and len(names) == 1:
        return spec.measures[0]
    if line.measure not in names:
        raise InvalidRequest(field, line.measure, f"one of {', '.join(names)}")
    return spec.measures[names.index(line.measure)]


def _check_group(line: WindowQuestion, spec: QuerySpec, field: str = "group") -> None:
    for column in line.group or ():
        if column not in spec.group_by:
            columns = ", ".join(spec.group_by) or f"(none: {spec.name} is not grouped)"
            raise InvalidRequest(f"{field}.{column}", (line.group or {})[column], f"one of the columns {columns}")
    if line.group is not None and line.is_global:
        raise InvalidRequest(field, line.group, "a group, or global: true, not both")


def _chosen(aggregate: GroupedAggregate, group: Mapping[str, Any]) -> Any:
    """Codes of the groups with these values. Raises InvalidRequest for a value of another type."""
    keep = np.ones(len(aggregate), bool)
    for name, column in zip(aggregate.key_names, aggregate.rows(), strict=True):
        if name not in group:
            continue
        value = group[name]
        if value is None:
            keep &= column.is_null().to_numpy(zero_copy_only=False)
            continue
        try:
            if isinstance(value, bool) != pa.types.is_boolean(column.type):
                raise pa.ArrowTypeError("a truth value and something else")
            wanted = pa.scalar(value, column.type)
        except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, OverflowError):
            raise InvalidRequest(f"group.{name}", value, f"a value of type {column.type}, or null") from None
        keep &= pc.fill_null(pc.equal(column, wanted), False).to_numpy(zero_copy_only=False)
    codes = np.flatnonzero(keep)
    return codes if len(codes) < 2 else sorted_groups(aggregate)[keep[sorted_groups(aggregate)]]


def _only(stack: Stack, aggregate: GroupedAggregate, group: Mapping[str, Any], found: Sequence[WindowAnswer]) -> Stack:
    """The one group with these values. Raises NotFound, InvalidRequest."""
    codes = _chosen(aggregate, group)
    if not len(codes):
        raise _no_group(group, found)
    return stack.take(codes[:1])


def _no_group(group: Mapping[str, Any], found: Sequence[WindowAnswer]) -> NotFound:
    return NotFound(f"no record of the group {dict(group)} in the window at {rfc3339(found[0].start_ms)}")


def _require_disjoint(found: Sequence[WindowAnswer], measure: Measure) -> None:
    overlap = any(b.start_ms < a.end_ms for a, b in pairwise(found))
    if overlap and not measure.function.make(measure.parameters, None).properties.idempotent:
        raise InvalidRequest(
            "merge",
            True,
            "false, or windows that do not overlap, or a measure that takes a record twice without harm",
            f"the windows overlap, and {measure.name} would count their common records twice",
        )


def _same_window(there: AnsweredWindows, window: WindowAnswer, partner: SecondSynopsis) -> WindowAnswer:
    theirs = there.starting(window.start_ms)
    if theirs is None:
        raise NotFound(f"query {partner.query}: no window that starts at {rfc3339(window.start_ms)} has an answer")
    if theirs.end_ms != window.end_ms:
        reason = f"its window ends at {rfc3339(theirs.end_ms)}, not at {rfc3339(window.end_ms)}"
        raise InvalidRequest("with.query", partner.query, "a query with the same windows", reason)
    return theirs


def _shown(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: plain(value) for name, value in group.items()}


def _head(line: WindowQuestion, spec: QuerySpec, measure: Measure, found: Sequence[WindowAnswer]) -> dict[str, Any]:
    """What a line says besides its numbers. Of merge_groups windows the least advanced phase, and all revisions."""
    first = found[0]
    head: dict[str, Any] = {"id": line.id, "query": spec.name, "measure": measure.name}
    if line.question is not None:
        head["question"] = line.question
    if line.group is not None:
        head["group"] = dict(line.group)
    head["window"] = {"start": rfc3339(first.start_ms), "end": rfc3339(max(w.end_ms for w in found))}
    head["phase"] = min((w.phase for w in found), key=_PHASES.index)
    if not line.merge:
        return {**head, "revision": first.revision, "completeness": first.completeness}
    missing = sorted({edge for w in found for edge in w.completeness.get("missing", ())})
    ratios = [w.completeness.get("ratio") for w in found]
    ratio = None if any(r is None for r in ratios) else min(r for r in ratios if r is not None)
    head["windows"] = [{"start": rfc3339(w.start_ms), "revision": w.revision} for w in found]
    return {**head, "completeness": {"ratio": ratio, "missing": missing}}

"""What changes the facts of an answer after it was given: late records (`with_late`), and the union of windows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from edgewater.answers.causes import Cause
from edgewater.answers.facts import (
    MAX_LISTED_EDGES,
    NONE,
    NOT_LISTED,
    UNKNOWN,
    Amount,
    Constants,
    Deviation,
    EdgeStatements,
    Facts,
    Predicted,
    joint_confidence,
)
from edgewater.answers.withheld_bounds import LateRecords, WithheldBound
from edgewater.model.query import QuerySpec
from edgewater.synopses.rests import NOTHING, union_of_rests
from edgewater.wire import GUESSES, REJECTIONS, Rest, groups_of, reason_of

MAX_COUNTED = 1 << 53
"""A count of records that is larger is stored as this number."""
MAX_LOSSES = 100
"""The number of stated losses that a union of windows lists. Further ones are listed without their time and number."""
MAX_DEVICES = 100
"""The number of devices and reasons for which a window, or a union of windows, tells rejected records apart. Those of
others may belong to any group. They are stored with each answer."""


def late_deviations(late: Mapping[str, LateRecords]) -> tuple[Deviation, ...]:
    """Returns what an answer deviates by records that came late, were rejected, or were guessed about.

    The values of a rejected record are not known. It is also not known whether the query's condition would accept it,
    and whether it was one record: a line that cannot be read may be several. So only late records have a number that
    bounds anything.

    Args:
        late: by reason, or by `DroppedRecords.kind`. A reason that is neither a rejection nor a guess is of late
            records.
    """
    found = []
    for kind, each in sorted(late.items()):
        (reason, only), n = reason_of(kind), each.records
        if reason in GUESSES:
            lacks, extra = (UNKNOWN if may else NONE for may in (GUESSES[reason].may_lack, GUESSES[reason].adds))
            found.append(Deviation(Cause.GUESSED, reason=reason, records=n, lacks=lacks, extra=extra))
        elif reason in REJECTIONS:
            found.append(Deviation(Cause.REJECTED, reason=reason, records=n, lacks=UNKNOWN, only=groups_of(only)))
        else:
            lacks = Amount(n, n) if n < MAX_COUNTED else UNKNOWN
            found.append(Deviation(Cause.AFTER_FINAL, reason=reason, records=n, lacks=lacks, amounts=each.amounts))
    return tuple(found)


def with_late(facts: Facts, late: Mapping[str, LateRecords]) -> Facts:
    """Returns the facts of an answer, and what is known since: records that came late, were rejected or guessed about.

    Args:
        late: by reason; numbers of 0 are ignored.
    """
    added = late_deviations({reason: each for reason, each in late.items() if each.records}) if late else ()
    if not added:
        return facts
    lacking = sum(d.records for d in added if d.lacks != NONE)
    share = facts.observed / (facts.observed + lacking) if lacking else 1.0
    came = [d for d in added if d.cause is Cause.AFTER_FINAL]
    allowed = [_left_of(d, d.lacks.most, came) if d.cause is Cause.MAY_CHANGE else d for d in facts.deviations]
    return replace(facts, ratio=facts.ratio * share, deviations=(*allowed, *added))


def _left_of(allowed: Deviation, most: int | None, came: Iterable[Deviation]) -> Deviation:
    """Returns what an answer still allows for when some late records have come.

    Args:
        most: the number that it allowed for before; None: any number.
    """
    if most is None:
        return allowed
    amounts = dict(allowed.amounts)
    for each in came:
        most -= each.records
        for name in amounts.keys() & each.amounts.keys():
            left, gone = amounts[name], each.amounts[name]
            above, below = left.above - gone.above, left.below - gone.below
            if above >= 0.0 and below >= 0.0:
                amounts[name] = replace(left, above=above, below=below)
    return replace(allowed, lacks=Amount(0, max(most, 0)), amounts=amounts)


def united(parts: Sequence[Facts], spec: QuerySpec, *, empty: int = 0, unanswered: int = 0) -> Facts:
    """Returns the facts of the union of several windows. `ratio` is the mean of the windows.

    Args:
        parts: the facts of the windows that have an answer; at least one. A part may be a union itself.
        empty: number of windows without an answer that are empty, so that they need none.
        unanswered: number of other windows without an answer. They are a deviation.
    """
    weights = [max(part.windows, 1) for part in parts]
    windows = sum(weights) + empty + unanswered
    if windows == weights[0]:
        return replace(parts[0], windows=windows)
    deviations = _united_deviations(parts)
    if unanswered:
        deviations = (*deviations, Deviation(Cause.UNANSWERED, lacks=UNKNOWN, windows=unanswered))
    predicted = any(part.predicted is not None for part in parts)
    # What is about one window has no meaning for several, and is left out: `accuracy`, `session`.
    return Facts(
        expected=0 if any(part.expected == 0 for part in parts) else max(part.expected for part in parts),
        reported=min(part.reported for part in parts),
        ratio=(sum(part.ratio * weight for part, weight in zip(parts, weights, strict=True)) + empty) / windows,
        observed=sum(part.observed for part in parts),
        late=sum(part.late for part in parts),
        staleness_ms=max(part.staleness_ms for part in parts),
        first_staleness_ms=max(part.first_staleness_ms for part in parts),
        deviations=deviations,
        withheld=union_of_windows(spec, [part.withheld for part in parts]),
        both_signs=tuple(sorted({name for part in parts for name in part.both_signs})),
        rests=united_rests(spec, [part.rests for part in parts]),
        has_data=any(part.has_data for part in parts),
        deliveries={edge: each for part in parts for edge, each in part.deliveries.items()},
        edges=_united_edges([part.edges for part in parts], spec),
        predicted=Predicted() if predicted else None,
        windows=windows,
    )


def _united_edges(parts: Sequence[EdgeStatements], spec: QuerySpec) -> EdgeStatements:
    """Returns what each edge withholds of several windows together. An edge has its constants if it has them in
    each window in which it withholds values.
    """
    by_edge: dict[str, list[tuple[Mapping[str, WithheldBound], Constants]]] = {}
    for part in parts:
        if part.withheld is None:
            return NOT_LISTED
        for edge, bounds in part.withheld.items():
            by_edge.setdefault(edge, []).append((bounds, part.only.get(edge, {})))
    if len(by_edge) > MAX_LISTED_EDGES:
        return NOT_LISTED
    withheld = {edge: union_of_windows(spec, [bounds for bounds, _ in each]) for edge, each in by_edge.items()}
    only = {edge: each[0][1] for edge, each in by_edge.items() if all(one[1] == each[0][1] for one in each)}
    return EdgeStatements(None, None, None, withheld, {edge: values for edge, values in only.items() if values})


def _united_deviations(parts: Iterable[Facts]) -> tuple[Deviation, ...]:
    """Returns the deviations without repetitions. Numbers of records of one cause and reason are added up. Equal losses
    of several windows are one loss; equal losses of one window are several.

    Records of an edge are in other groups than in another window, unless the edge has a constant in both.
    """
    by_identity: dict[tuple[object, ...], Deviation] = {}
    losses, devices = 0, 0
    for identity, each in (found for part in parts for found in _identified(part.deviations)):
        is_loss = each.cause is Cause.INPUT_LOST
        if is_loss and identity not in by_identity:
            losses += 1
            if losses > MAX_LOSSES:
                each = replace(each, lacks=UNKNOWN, from_ms=None, to_ms=None)
                identity = _identity(each)
        elif each.cause is Cause.REJECTED and each.only and identity not in by_identity:
            devices += 1
            if devices > MAX_DEVICES:
                each = replace(each, only={})
                identity = _identity(each)
        known = by_identity.get(identity)
        if known is None:
            by_identity[identity] = each
        elif not is_loss:  # a stated loss concerns several windows, and is one loss
            by_identity[identity] = replace(
                known,
                records=known.records + each.records,
                lacks=known.lacks + each.lacks,
                extra=known.extra + each.extra,
                windows=known.windows + each.windows,
                amounts={
                    name: WithheldBound.union([known.amounts[name], each.amounts[name]])
                    for name in sorted(known.amounts.keys() & each.amounts.keys())
                },
                confidence=joint_confidence((known.confidence, each.confidence)),
            )
    return tuple(by_identity.values())


def _identified(deviations: Iterable[Deviation]) -> Iterator[tuple[tuple[object, ...], Deviation]]:
    """Yields the deviations of one window. The identity of a loss says which one of several equal losses it is."""
    times = Counter[tuple[object, ...]]()
    for each in deviations:
        identity = _identity(each)
        if each.cause is Cause.INPUT_LOST:
            times[identity] += 1
            identity = (*identity, times[identity])
        yield identity, each


def _identity(each: Deviation) -> tuple[object, ...]:
    """Returns what distinguishes the deviation from others of a union. Only losses have a time and a number of their
    own.
    """
    own = (each.from_ms, each.to_ms, each.lacks) if each.cause is Cause.INPUT_LOST else ()
    return each.cause, each.edge, each.source, each.reason, own, tuple(sorted(each.only.items()))


def united_rests(spec: QuerySpec, windows: Sequence[Mapping[str, Rest | None]]) -> dict[str, Rest | None]:
    """Returns what all groups of merged windows lack, by measure; None: unknown."""
    names = {name for window in windows for name in window}
    functions = {m.name: m.function.name for m in spec.measures}
    each = {name: [window.get(name, NOTHING) for window in windows] for name in sorted(names)}
    return {name: union_of_rests(functions[name], rests) for name, rests in each.items()}


def union_of_bounds(spec: QuerySpec, parts: Iterable[Mapping[str, WithheldBound]]) -> dict[str, WithheldBound]:
    """Returns the bounds of merged values; the shares of a sum hold only if its values have one sign."""
    extrema = {m.name for m in spec.measures if m.function.error == "extremum"}
    each: dict[str, list[WithheldBound]] = {}
    for bounds in parts:
        for name, bound in bounds.items():
            each.setdefault(name, []).append(bound)
    return {name: WithheldBound.union(several, of_extremum=name in extrema) for name, several in each.items()}


def union_of_windows(spec: QuerySpec, windows: Sequence[Mapping[str, WithheldBound]]) -> dict[str, WithheldBound]:
    """Returns the bounds of merged windows. The sums of one window may have another sign than those of the next."""
    sums = {m.name for m in spec.measures if m.function.error == "sum" and m.function.name != "count"}
    merged = union_of_bounds(spec, windows)
    return {n: b.without_shares() if n in sums and len(windows) > 1 else b for n, b in merged.items()}

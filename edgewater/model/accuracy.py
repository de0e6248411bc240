"""The `accuracy` of a query: P(relative error ≤ error) ≥ confidence for the early answer to each window."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edgewater.arrivals.schedule import ReportSchedule
from edgewater.arrivals.targets import (
    NOT_PREDICTED,
    SCOPES,
    AccuracyTarget,
    GroupScope,
    MeasureKind,
    check_confidence,
    check_error,
    check_measure,
)
from edgewater.base.errors import InvalidQuery, did_you_mean
from edgewater.base.quantities import duration_ms, format_duration, fraction, require_keys
from edgewater.model.early_synopses import EARLY_SYNOPSES, SAMPLES, own_error, split_confidence, straggler_share
from edgewater.model.windows import CalendarWindow, SlidingWindow, Window

if TYPE_CHECKING:
    from edgewater.model.measure import Measure

KEYS = {"error": True} | dict.fromkeys("confidence measure substream scope range delays".split(), False)
"""The keys of an accuracy, and whether each is required."""
MAX_GROUPS = 256
"""The largest number of groups of a query with early answers. The center has an estimator for each group."""

_MAX_VALUE = 1e150
"""The largest absolute value whose square does not overflow."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The accuracy that a query requests: P(|estimate - truth| ≤ error·|truth|) ≥ confidence, per window.

    Attributes:
        measure: name of the measure for which the accuracy holds.
        others: names of further measures for which it holds. All of them are synopses then.
        kind: the kind of value that is estimated before all records have arrived; None for a function of a sample,
            which is not answered early.
        substream_ms: length f of a sub-stream, a divisor of the window's slices; None for the default length.
        scope: for a query with groups, whether the accuracy holds for each group or for all groups simultaneously;
            otherwise None.
        range: the least and the greatest possible value of an expensive function. A sample does not bound the values
            outside the sample, so without a range there is no interval. A cheap function is computed for all records
            and needs no range.
        delays_ms: event time within which every record reaches its edge, as the user declares; None if not declared.
    """

    error: float
    confidence: float
    measure: str
    kind: MeasureKind | None
    substream_ms: int | None = None
    scope: GroupScope | None = None
    range: tuple[float, float] | None = None
    delays_ms: int | None = None
    others: tuple[str, ...] = ()

    @classmethod
    def from_mapping(
        cls, mapping: object, measures: Sequence[Measure], window: Window, group_by: Sequence[str]
    ) -> Accuracy | None:
        """Reads a query's `accuracy`; None if `mapping` is None.

        Raises:
            InvalidQuery: names the field, the value and what is accepted.
        """
        if mapping is None:
            return None
        fields = require_keys(mapping, "accuracy", KEYS, InvalidQuery)
        measure, *others = chosen = _measures(fields.get("measure"), measures)
        sampled = measure.function.sample is not None
        if not isinstance(window, SlidingWindow) and not sampled:
            reason = "the end of a session window is known only after it has passed"
            if isinstance(window, CalendarWindow):
                reason = "arrivals are counted in equal parts of a window, and windows of a calendar unit differ"
            accepted = "a tumbling or sliding window of a duration, or no accuracy"
            raise InvalidQuery("accuracy", mapping, accepted, reason)
        error = check_error(_percentage(fields["error"], "accuracy.error", "5%"), "accuracy.error")
        confidence = _percentage(fields.get("confidence", "95%"), "accuracy.confidence", "95%")
        substream, delays = fields.get("substream"), fields.get("delays")
        for name, value in (("substream", substream), ("delays", delays)):
            if sampled and value is not None:
                raise InvalidQuery(
                    f"accuracy.{name}", value, f"no {name}", f"{measure.function.name} is not answered early"
                )
        result = cls(
            error,
            check_confidence(confidence, "accuracy.confidence"),
            measure.name,
            None if sampled else _kind(measure.function.name),
            None if substream is None else duration_ms(substream, "accuracy.substream", InvalidQuery, minimum_ms=1),
            _scope(fields.get("scope"), group_by),
            _range(fields.get("range"), measure),
            None if delays is None else duration_ms(delays, "accuracy.delays", InvalidQuery, minimum_ms=1),
            tuple(m.name for m in others),
        )
        report_schedule(window, result, 0)
        for each in chosen if result.kind in NOT_PREDICTED else ():
            _check_share(result, each, measures)
        return result

    @property
    def measures(self) -> tuple[str, ...]:
        """The names of all measures for which the accuracy holds. Each interval has the confidence by itself."""
        return self.measure, *self.others

    @property
    def named(self) -> str | list[str]:
        """The measures, as a query names them."""
        return list(self.measures) if self.others else self.measure

    def to_mapping(self) -> dict[str, object]:
        """Returns the canonical mapping, which `from_mapping` accepts."""
        result: dict[str, object] = {
            "error": _percentage_text(self.error),
            "confidence": _percentage_text(self.confidence),
            "measure": self.named,
        }
        if self.substream_ms is not None:
            result["substream"] = format_duration(self.substream_ms)
        if self.scope is not None:
            result["scope"] = self.scope
        if self.range is not None:
            result["range"] = list(self.range)
        if self.delays_ms is not None:
            result["delays"] = format_duration(self.delays_ms)
        return result

    def to_contract(self) -> Mapping[str, object]:
        """Returns the member ``requested`` of an answer's contract."""
        result: dict[str, object] = {"error": self.error, "confidence": self.confidence, "measure": self.named}
        return result if self.scope is None else {**result, "scope": self.scope}

    @property
    def early_kind(self) -> MeasureKind:
        """The measure's kind, for a query whose windows are answered early."""
        assert self.kind is not None
        return self.kind

    def of_records(self, measures: Sequence[Measure], withheld: float = 0.0) -> Accuracy:
        """Returns the accuracy for the number of records, if this accuracy is for a synopsis or an extreme.

        Its error is the part of this error that is left for missing records.

        Args:
            measures: the measures of the accuracy.
            withheld: the fraction of a group's records that edges may withhold.
        """
        share = min(straggler_share(m, self.error, self.confidence, withheld) for m in measures)
        return replace(self, error=share, confidence=max(split_confidence(m, self.confidence)[0] for m in measures))

    @property
    def target(self) -> AccuracyTarget:
        return AccuracyTarget(self.error, self.confidence)


def _kind(function: str) -> MeasureKind:
    if function in EARLY_SYNOPSES:
        return "records"
    return check_measure(function, "accuracy.measure", also=EARLY_SYNOPSES)


def _check_share(accuracy: Accuracy, measure: Measure, measures: Sequence[Measure]) -> None:
    """Raises InvalidQuery if an accuracy for a synopsis or an extreme cannot be met, or cannot be verified."""
    name, function = measure.name, measure.function.name
    if straggler_share(measure, accuracy.error, accuracy.confidence) <= 0:
        own = own_error(measure, split_confidence(measure, accuracy.confidence)[1])
        if own >= accuracy.error:
            accepted = f"an error above {100 * own:.3g}%, the error of {measure.to_text()} itself, or a larger synopsis"
            raise InvalidQuery("accuracy.error", f"{100 * accuracy.error:.12g}%", accepted)
        accepted = "a quantile between 0 and 1, both excluded"
        raise InvalidQuery(f"measures.{name}", measure.to_text(), accepted, "any record that is out may move it")
    if function in ("distinct", *SAMPLES) and not any(m.is_record_count for m in measures):
        accepted = f"a count() beside {function}, such as n: count()"
        reason = "the number of records in an early answer is not known without it"
        raise InvalidQuery("measures", [m.name for m in measures], accepted, reason)
    is_certain = accuracy.kind == "records" and split_confidence(measure, accuracy.confidence)[1] == 1
    if accuracy.scope == "all" and not is_certain:
        raise InvalidQuery(
            "accuracy.scope", "all", "each", f"the intervals of {function} hold for each group by itself"
        )


def _percentage(value: object, field: str, example: str) -> float:
    share = fraction(value)
    if share is None:
        raise InvalidQuery(field, value, f"a percentage between 0% and 100%, such as {example}")
    if share < 1 and _percentage_text(share) == "100%":
        raise InvalidQuery(field, value, "a percentage of at most 99.9999999999%", "it is rounded to 100%")
    return share


def _percentage_text(share: float) -> str:
    return f"{100 * share:.12g}%"


def _scope(value: object, group_by: Sequence[str]) -> GroupScope | None:
    if not group_by:
        if value is not None:
            accepted = "group_by with the columns of the groups, or no scope"
            raise InvalidQuery("accuracy.scope", value, accepted, "a query without groups has one answer per window")
        return None
    if value is None:
        return "each"
    for known in SCOPES:
        if value == known:
            return known
    raise InvalidQuery(
        "accuracy.scope",
        value,
        "each (the accuracy holds for every single group; the default) or all (for all groups simultaneously)",
    )


def _range(value: object, measure: Measure) -> tuple[float, float] | None:
    if value is None:
        return None
    if measure.function.name not in ("sum", "mean"):
        raise InvalidQuery(
            "accuracy.range", value, "a sum or a mean, or no range", f"{measure.function.name} needs none"
        )
    ends = value if isinstance(value, list | tuple) else ()
    if len(ends) == 2 and all(isinstance(e, int | float) and not isinstance(e, bool) for e in ends):
        least, greatest = ends
        if -_MAX_VALUE <= least <= greatest <= _MAX_VALUE:
            return float(least), float(greatest)
    raise InvalidQuery("accuracy.range", value, f"[least, greatest] of the values, numbers within ±{_MAX_VALUE:g}")


def _measures(named: object, measures: Sequence[Measure]) -> list[Measure]:
    """Returns the measures that an accuracy names: one measure, or several synopses."""
    names = [m.name for m in measures]
    accepted = f"one of the measures {', '.join(names)}"
    if named is None:
        if len(measures) != 1:
            reason = "the query has several" if measures else "the query has none with a name"
            raise InvalidQuery("accuracy.measure", None, accepted, reason)
        return [measures[0]]
    chosen: list[Measure] = []
    for name in named if isinstance(named, list) and named else [named]:
        measure = next((m for m in measures if m.name == name), None)
        if measure is None:
            raise InvalidQuery("accuracy.measure", name, accepted, f"unknown measure{did_you_mean(name, names)}")
        if measure not in chosen:
            chosen.append(measure)
    values = [m.name for m in chosen if m.function.name not in EARLY_SYNOPSES]
    if len(chosen) > 1 and values:
        reason = f"edges report the values of one measure by delay, and {values[0]} needs its values"
        accepted = f"one measure, or several of {', '.join(EARLY_SYNOPSES)}; or a query for each measure"
        raise InvalidQuery("accuracy.measure", named, accepted, reason)
    return chosen


def report_schedule(window: object, accuracy: Accuracy | None, lateness_ms: int) -> ReportSchedule | None:
    """Returns a query's report schedule; None if its windows are not answered early.

    Raises:
        InvalidQuery: the sub-stream does not divide the window's slices.
    """
    if accuracy is None or accuracy.kind is None or not isinstance(window, SlidingWindow):
        return None
    return ReportSchedule.of(window, accuracy.substream_ms, lateness_ms)


def group_key(values: Sequence[object]) -> str:
    """Returns a text that identifies a group, from the values of its key columns. Edges, center and clients use the
    same text.
    """
    return json.dumps(list(values), ensure_ascii=False, separators=(",", ":"))


def group_values(key: str) -> list[object]:
    """Returns the values from which `group_key` has made a key."""
    return list(json.loads(key))

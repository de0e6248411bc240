"""The stored form of `Facts`: JSON of format 2. Format 1, of release 0.3.0, is read, too."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from edgewater.answers.causes import Cause
from edgewater.answers.facts import (
    UNKNOWN,
    AccuracyFacts,
    Amount,
    Bounds,
    Deviation,
    EdgeStatements,
    Facts,
    GroupCounts,
    Predicted,
    SessionFacts,
)
from edgewater.answers.statement import ACCURACY, BOTH_SIGNS, NOTHING_ARRIVED
from edgewater.answers.uniting import late_deviations
from edgewater.answers.withheld_bounds import LateRecords, WithheldBound
from edgewater.base.errors import StorageError, UnsupportedVersion
from edgewater.base.streams import Delivery
from edgewater.wire import Rest

FORMAT = 2  # format: of stored facts
_MARK = f'{{"format":{FORMAT},'


@dataclass(frozen=True, slots=True)
class _Stored:
    """Infinite bounds and NaN are texts, since JSON has no such numbers."""

    __pydantic_config__ = ConfigDict(ser_json_inf_nan="strings")
    format: int
    facts: Facts


_STORED = TypeAdapter(_Stored)
_REASON = re.compile(r"([a-z][a-z-]*): (\d+)(?=[,)])")
"""Release 0.3.0 stored the reasons of late and rejected records in the message only."""


def facts_to_json(facts: Facts) -> str:
    """Returns the stored form. Members with their default values are absent."""
    return _STORED.dump_json(_Stored(FORMAT, facts), exclude_defaults=True).decode()


def facts_from_json(text: str) -> Facts:
    """Reads the stored form.

    Raises:
        UnsupportedVersion: a newer release has written it.
        StorageError: it cannot be read.
    """
    try:
        if text.startswith(_MARK):
            return _STORED.validate_json(text).facts
        stored = json.loads(text)
        if "format" in stored:
            raise UnsupportedVersion(f"an answer has format {stored['format']}; this release reads {FORMAT}")
        return _format_1(stored)
    except (ValidationError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as exc:
        raise StorageError(f"the facts of an answer cannot be read: {type(exc).__name__}") from exc


def _format_1(stored: Mapping[str, Any]) -> Facts:
    """Reads the JSON of release 0.3.0, in which a statement was stored instead of facts."""
    completeness, records, error = stored["completeness"], stored["records"], stored["error"]
    violations = stored["contract"]["violations"]
    codes = {violation["code"]: violation["message"] for violation in violations}
    only = completeness.get("only", {})
    deviations = [Deviation(Cause.MISSING, e, lacks=UNKNOWN, only=only.get(e, {})) for e in completeness["missing"]]
    deviations += [Deviation(Cause.LEFT, e, lacks=UNKNOWN, only=only.get(e, {})) for e in completeness.get("left", ())]
    deviations += [
        Deviation(Cause.LOST_STATE, e, lacks=UNKNOWN, extra=UNKNOWN, only=only.get(e, {}))
        for e in completeness.get("lost_state", ())
    ]
    for loss in completeness.get("losses", ()):
        same = {name: loss[name] for name in ("edge", "source", "reason", "from_ms", "to_ms")}
        lacks = Amount(0, loss["records"])
        deviations.append(Deviation(Cause.INPUT_LOST, **same, lacks=lacks, only=only.get(loss["edge"], {})))
    deviations += late_deviations({r: LateRecords(n) for r, n in completeness.get("guessed", {}).items()})
    told = (codes.get(cause, "") for cause in (Cause.AFTER_FINAL, Cause.REJECTED))
    each = (found for message in told for found in _REASON.findall(message))
    deviations += late_deviations({reason: LateRecords(int(n)) for reason, n in each})
    session = stored.get("session")
    return Facts(
        completeness["expected"],
        completeness["reported"],
        completeness["ratio"],
        records["observed"],
        records["late"],
        stored["staleness_ms"],
        stored["first_staleness_ms"],
        tuple(deviations),
        _bounds(error["withheld"]),
        tuple(v["message"].split(":")[0] for v in violations if v["code"] == BOTH_SIGNS),
        {name: None if rest is None else Rest.from_state(rest) for name, rest in stored["rests"].items()},
        NOTHING_ARRIVED not in codes,
        {edge: tuple(map(Delivery, each)) for edge, each in completeness.get("delivery", {}).items()},
        _edges(stored["edges"]),
        None if session is None else SessionFacts(session["cut"], session["cuts"], stored.get("merged_into_ms")),
        _accuracy(stored, codes) if "accuracy" in stored else None,
        _predicted(stored["prediction"]) if "prediction" in stored else None,
    )


def _bounds(stored: Mapping[str, Mapping[str, float | None]]) -> dict[str, WithheldBound]:
    known = {name: {n: math.inf if v is None else v for n, v in bound.items()} for name, bound in stored.items()}
    return {name: WithheldBound(**bound) for name, bound in known.items()}


def _edges(stored: Mapping[str, Any]) -> EdgeStatements:
    closed, withheld = stored["closed"], stored["withheld"]
    return EdgeStatements(
        None if closed is None else tuple(closed),
        stored["closed_until_ms"],
        stored["late"],
        None if withheld is None else {edge: _bounds(bounds) for edge, bounds in withheld.items()},
        stored.get("only", {}),
    )


def _accuracy(stored: Mapping[str, Any], codes: Mapping[str, str]) -> AccuracyFacts:
    told, records, groups = stored["accuracy"], stored["records"], stored["accuracy"].get("groups", {})
    is_predicted = "prediction" in stored
    return AccuracyFacts(
        told["measure"],
        told["sampling"],
        told["waited_ms"],
        told["coverage"],
        told["covered"],
        "silent" in told,
        told.get("straggler_share"),
        tuple(told.get("silent", ())),
        told.get("exceeding_delays"),
        GroupCounts(**groups) if "eligible" in groups else None,
        "limit" in groups,
        Cause.MISSING not in codes and (is_predicted or ACCURACY in codes),
        codes.get(ACCURACY, ""),
        records["expected"] if is_predicted else None,
        records["sampled"] if is_predicted else None,
        {name: stored["error"].get(name) for name in ("sampling", "straggler", "missing")} if is_predicted else {},
    )


def _predicted(stored: Mapping[str, Any]) -> Predicted:
    ((measure, told),) = stored.items()
    groups: Mapping[str, Sequence[float | None]] | None = told.get("groups")
    interval = (None, None, None) if groups is not None else (told["estimate"], told["lower"], told["upper"])
    return Predicted(
        measure,
        told.get("of") == "records",
        told["confidence"],
        interval,
        None if groups is None else {key: _interval(*each) for key, each in groups.items()},
    )


def _interval(estimate: float | None, lower: float | None, upper: float | None) -> Bounds:
    return estimate, lower, upper

"""Lines of a stream of questions: read from JSON, and checked as far as that needs no query. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from edgewater.errors import InvalidRequest
from edgewater.synopses.named_questions import BINARY_QUESTIONS, QUESTION_KINDS, read_confidence

MAX_LATEST = 1000
_KEYS = (
    "id", "at", "latest", "window", "measure", "question", "item", "q", "x", "lo", "hi", "k", "group", "global",
    "merge", "confidence", "with",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class WindowSelector:
    """Which windows: exactly one of the three."""

    latest: int | None = None
    at_ms: int | None = None
    start_ms: int | None = None

    @property
    def shown(self) -> str:
        if self.latest is not None:
            return "(of the latest)"
        return f"over {self.at_ms} ms" if self.at_ms is not None else f"that starts at {self.start_ms} ms"


@dataclass(frozen=True, slots=True)
class SecondSynopsis:
    """The second synopsis of a question about two: a measure of another query (or of the same)."""

    query: str
    measure: str | None = None
    group: Mapping[str, Any] | None = None

    @property
    def shown(self) -> dict[str, Any]:
        return {"query": self.query, "measure": self.measure}


@dataclass(frozen=True, slots=True)
class WindowQuestion:
    """One question.

    Attributes:
        id: whatever names it to its sender; it comes back with each line of the answer.
        measure: None: the query's only one.
        question: one of `asking.QUESTION_KINDS`; None: what the measure says by itself.
        given: the question's fields; see `asking.question`.
        group: column -> value; groups with these values. None: all groups.
        is_global: all groups merged into one.
        merge: all windows merged into one.
    """

    target: WindowSelector
    id: Any = None
    measure: str | None = None
    question: str | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    group: Mapping[str, Any] | None = None
    is_global: bool = False
    merge: bool = False
    confidence: float | None = None
    partner: SecondSynopsis | None = None

    def of_partner(self) -> WindowQuestion:
        """The same question from the partner's side, to find its measure and group."""
        assert self.partner is not None
        return replace(self, measure=self.partner.measure, group=self.partner.group, is_global=False)

    @classmethod
    def from_mapping(cls, given: object, read_time: Callable[[str], int]) -> WindowQuestion:
        """Reads a line of `docs/reference/query.md`.

        Args:
            read_time: reads a time that is given as a text; raises ValueError with what it accepts.

        Raises:
            InvalidRequest: names the field, its value and what is accepted.
        """
        if not isinstance(given, dict):
            raise InvalidRequest("", given, 'an object, such as {"id": 1, "latest": 1, "measure": "n"}')
        for key in given:
            if key not in _KEYS:
                raise InvalidRequest(str(key), given[key], f"one of the fields {', '.join(_KEYS)}", "unknown field")
        name = _text(given, "question")
        if name is not None and name not in QUESTION_KINDS:
            raise InvalidRequest("question", name, f"one of {', '.join(QUESTION_KINDS)}", "unknown question")
        partner = _partner(given.get("with"))
        if partner is not None and name not in BINARY_QUESTIONS:
            raise InvalidRequest("with", given["with"], f"a question about two: {', '.join(BINARY_QUESTIONS)}")
        group = _group(given.get("group"), "group")
        return cls(
            _target(given, read_time),
            given.get("id"),
            _text(given, "measure"),
            name,
            {k: given[k] for k in ("item", "q", "x", "lo", "hi", "k") if k in given},
            group,
            _flag(given, "global"),
            _flag(given, "merge"),
            read_confidence(given.get("confidence")),
            partner,
        )


def parse_json(text: bytes) -> object:
    """The JSON of a line, which can be written again: parts of it stand in the answer. Raises InvalidRequest."""
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
        json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as exc:
        shown = text[:80].decode(errors="replace")
        raise InvalidRequest("", shown, "a line of JSON", str(exc)) from exc


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is too large a number")
    return number


def _target(given: Mapping[str, Any], read_time: Callable[[str], int]) -> WindowSelector:
    named = [key for key in ("latest", "at", "window") if given.get(key) is not None]
    if len(named) != 1:
        accepted = 'one of "latest": how many, "at": a time, "window": its start'
        raise InvalidRequest("", {key: given[key] for key in named}, accepted, "which windows?")
    (key,) = named
    value = given[key]
    if key == "latest":
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_LATEST:
            raise InvalidRequest(key, value, f"a whole number from 1 to {MAX_LATEST}")
        return WindowSelector(latest=value)
    try:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError("a time: RFC 3339, or unix time in ms")
        millis = read_time(str(value))
    except ValueError as exc:
        raise InvalidRequest(key, value, str(exc)) from exc
    return WindowSelector(at_ms=millis) if key == "at" else WindowSelector(start_ms=millis)


def _text(given: Mapping[str, Any], key: str) -> str | None:
    value = given.get(key)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(key, value, "a text")
    return value


def _flag(given: Mapping[str, Any], key: str) -> bool:
    value = given.get(key, False)
    if not isinstance(value, bool):
        raise InvalidRequest(key, value, "true or false")
    return value


def _group(value: object, field: str) -> Mapping[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not value:
        raise InvalidRequest(field, value, 'an object of columns and values, such as {"carrier": "UA"}')
    return value


def _partner(value: object) -> SecondSynopsis | None:
    if value is None:
        return None
    accepted = '{"query": name, "measure": name}, with a "group" or without'
    if not isinstance(value, dict) or not isinstance(value.get("query"), str):
        raise InvalidRequest("with", value, accepted)
    if not set(value) <= {"query", "measure", "group"}:
        raise InvalidRequest("with", value, accepted)
    return SecondSynopsis(value["query"], _text(value, "measure"), _group(value.get("group"), "with.group"))

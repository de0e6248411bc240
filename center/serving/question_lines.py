"""`WindowQuestion`: one question of a stream, read from a JSON line and checked without its query. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from edgewater.model.errors import InvalidRequest
from edgewater.model.json_types import Document, Group, Json
from edgewater.synopses.named_questions import BINARY_QUESTIONS, QUESTION_KINDS, read_confidence

MAX_LATEST = 1000
Arguments: TypeAlias = Mapping[str, Any]  # `parse_question` checks them
_KEYS = (
    "id",
    "at",
    "latest",
    "window",
    "measure",
    "question",
    "item",
    "q",
    "x",
    "lo",
    "hi",
    "k",
    "group",
    "global",
    "merge",
    "confidence",
    "with",
)


@dataclass(frozen=True, slots=True)
class WindowSelector:
    """Selects windows; exactly one attribute is set."""

    latest: int | None = None
    at_ms: int | None = None
    start_ms: int | None = None

    @property
    def description(self) -> str:
        if self.latest is not None:
            return "(of the latest)"
        return f"that contains {self.at_ms} ms" if self.at_ms is not None else f"that starts at {self.start_ms} ms"


@dataclass(frozen=True, slots=True)
class SecondSynopsis:
    """The second synopsis of a question about two synopses: a measure of another query, or of the same query."""

    query: str
    measure: str | None = None
    group: Group | None = None

    @property
    def description(self) -> Document:
        return {"query": self.query, "measure": self.measure}


@dataclass(frozen=True, slots=True)
class WindowQuestion:
    """One question about windows of a query.

    Attributes:
        id: the sender's identifier, repeated in each line of the answer.
        measure: None: the query's only measure.
        name: one of `QUESTION_KINDS`; None: the measure's default question.
        arguments: the question's fields; see `parse_question`.
        group: column -> value, to select groups; None: all groups.
        is_global: merge all groups.
        merge: merge all windows.
    """

    selector: WindowSelector
    id: Json = None
    measure: str | None = None
    name: str | None = None
    arguments: Arguments = field(default_factory=dict)
    group: Group | None = None
    is_global: bool = False
    merge: bool = False
    confidence: float | None = None
    second: SecondSynopsis | None = None

    def of_second(self) -> WindowQuestion:
        """The same question with the measure and group of the second synopsis."""
        assert self.second is not None
        return replace(self, measure=self.second.measure, group=self.second.group, is_global=False)

    @classmethod
    def from_mapping(cls, fields: object, read_time: Callable[[str], int]) -> WindowQuestion:
        """Reads a line as documented in `docs/reference/query.md`.

        Args:
            read_time: returns the milliseconds of a time that a field gives as text; raises ValueError with the
                accepted formats.

        Raises:
            InvalidRequest: names the field, its value and the accepted values.
        """
        if not isinstance(fields, dict):
            raise InvalidRequest("", fields, 'an object, such as {"id": 1, "latest": 1, "measure": "n"}')
        for key in fields:
            if key not in _KEYS:
                raise InvalidRequest(str(key), fields[key], f"one of the fields {', '.join(_KEYS)}", "unknown field")
        name = _string(fields, "question")
        if name is not None and name not in QUESTION_KINDS:
            raise InvalidRequest("question", name, f"one of {', '.join(QUESTION_KINDS)}", "unknown question")
        second = _second(fields.get("with"))
        if second is not None and name not in BINARY_QUESTIONS:
            raise InvalidRequest("with", fields["with"], f"a question about two: {', '.join(BINARY_QUESTIONS)}")
        group = _group(fields.get("group"), "group")
        return cls(
            _selector(fields, read_time),
            fields.get("id"),
            _string(fields, "measure"),
            name,
            {k: fields[k] for k in ("item", "q", "x", "lo", "hi", "k") if k in fields},
            group,
            _flag(fields, "global"),
            _flag(fields, "merge"),
            read_confidence(fields.get("confidence")),
            second,
        )


def parse_json(text: bytes) -> object:
    """Parses a line as JSON that can be serialised again: the answer repeats parts of it. Raises InvalidRequest."""
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
        json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as exc:
        description = text[:80].decode(errors="replace")
        raise InvalidRequest("", description, "a line of JSON", str(exc)) from exc


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is out of range")
    return number


def _selector(fields: Document, read_time: Callable[[str], int]) -> WindowSelector:
    named = [key for key in ("latest", "at", "window") if fields.get(key) is not None]
    if len(named) != 1:
        accepted = 'one of "latest": a number of windows, "at": a time, "window": a start time'
        raise InvalidRequest("", {key: fields[key] for key in named}, accepted, "which windows?")
    (key,) = named
    value = fields[key]
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


def _string(fields: Document, key: str) -> str | None:
    value = fields.get(key)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(key, value, "a text")
    return value


def _flag(fields: Document, key: str) -> bool:
    value = fields.get(key, False)
    if not isinstance(value, bool):
        raise InvalidRequest(key, value, "true or false")
    return value


def _group(value: object, field: str) -> Group | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not value:
        raise InvalidRequest(field, value, 'an object of columns and values, such as {"carrier": "UA"}')
    return value


def _second(value: object) -> SecondSynopsis | None:
    if value is None:
        return None
    accepted = '{"query": name, "measure": name}, with a "group" or without'
    if not isinstance(value, dict) or not isinstance(value.get("query"), str):
        raise InvalidRequest("with", value, accepted)
    if not set(value) <= {"query", "measure", "group"}:
        raise InvalidRequest("with", value, accepted)
    return SecondSynopsis(value["query"], _string(value, "measure"), _group(value.get("group"), "with.group"))

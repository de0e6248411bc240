"""`QuestionLine`: one question of a request, checked without its query. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Self, TypeAlias

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, field_validator, model_validator

from edgewater.base.errors import InvalidConfig, InvalidRequest
from edgewater.base.timestamps import parse_time
from edgewater.model.json_types import Document, load_json
from edgewater.runtime.configuration import Section, parsed_by, refusal, validate
from edgewater.synopses.named_questions import BINARY_QUESTIONS, QUESTION_KINDS, read_confidence

MAX_LATEST = 1000  # limit: input of a question
MAX_QUESTIONS = 1000  # limit: of a request
Arguments: TypeAlias = Mapping[str, Any]  # `parse_question` checks them
_ARGUMENTS = ("item", "q", "x", "lo", "hi", "k")


def _only(accepted: str, fits: Callable[[Any], bool], reason: str = "") -> BeforeValidator:
    """Returns a validator that refuses all other values than null."""

    def validated(value: object) -> object:
        if value is not None and not fits(value):
            raise refusal(accepted, reason)
        return value

    return BeforeValidator(validated)


def _millis(value: object) -> int | None:
    try:
        if isinstance(value, bool) or not isinstance(value, int | str | None):
            raise ValueError("a time: RFC 3339, or unix time in ms")
        return None if value is None else parse_time(str(value))
    except ValueError as exc:
        raise refusal(str(exc)) from exc


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_LATEST


_Text = Annotated[str | None, _only("a text", lambda value: isinstance(value, str))]
_Flag = Annotated[bool, _only("true or false", lambda value: isinstance(value, bool))]
_Time = Annotated[int | None, BeforeValidator(_millis), WithJsonSchema({"type": ["string", "integer", "null"]})]
_Number = Annotated[Any, WithJsonSchema({"type": ["number", "null"]})]
_GROUP_ACCEPTED = 'an object of columns and values, such as {"carrier": "UA"}'
_Group = Annotated[dict[str, Any] | None, _only(_GROUP_ACCEPTED, lambda value: isinstance(value, dict) and bool(value))]
_SECOND_ACCEPTED = '{"query": name, "measure": name}, with a "group" or without'


class SecondSynopsis(Section):
    """The second synopsis of a question about two synopses: a measure of another query, or of the same query."""

    query: str
    measure: _Text = None
    group: _Group = None
    """Null: all groups merged."""

    @property
    def description(self) -> Document:
        return {"query": self.query, "measure": self.measure}


class QuestionLine(Section):
    """One question; exactly one of `latest`, `at` and `window` is set."""

    id: Any = None
    """Repeated in the answer."""
    latest: Annotated[int | None, _only(f"a whole number from 1 to {MAX_LATEST}", _is_count)] = None
    """The last n windows."""
    at_ms: _Time = Field(default=None, alias="at")
    """Every window that contains this time."""
    start_ms: _Time = Field(default=None, alias="window")
    """The window that starts at this time."""
    measure: _Text = None
    """Optional if the query has only one."""
    name: Annotated[
        str | None, _only(f"one of {', '.join(QUESTION_KINDS)}", lambda q: q in QUESTION_KINDS, "unknown question")
    ] = Field(default=None, alias="question")
    """count, sum, mean, variance, min, max, distinct, quantile (`q`), rank (`x`), frequency (`item`), contains
    (`item`), range and proportion (`lo`, `hi`), top (`k`), self_join_size, false_positive_rate; join_size, union_size
    and intersection_size (`with`). Null: the measure's default."""
    item: Any = None
    q: _Number = None
    x: _Number = None
    lo: _Number = None
    hi: _Number = None
    k: _Number = None
    group: _Group = None
    """Only groups with these values."""
    is_global: _Flag = Field(default=False, alias="global")
    """All groups merged."""
    merge: _Flag = False
    """All windows merged."""
    confidence: Annotated[float | None, parsed_by(lambda value, _: read_confidence(value))] = None
    second: Annotated[SecondSynopsis | None, _only(_SECOND_ACCEPTED, lambda value: isinstance(value, dict))] = Field(
        default=None, alias="with"
    )

    @field_validator("second")
    @classmethod
    def _of_two(cls, second: SecondSynopsis | None, info: ValidationInfo) -> SecondSynopsis | None:
        if second is not None and info.data.get("name") not in BINARY_QUESTIONS:
            raise refusal(f"a question about two: {', '.join(BINARY_QUESTIONS)}")
        return second

    @model_validator(mode="after")
    def _one_selector(self) -> Self:
        if sum(each is not None for each in (self.latest, self.at_ms, self.start_ms)) != 1:
            accepted = 'one of "latest": a number of windows, "at": a time, "window": a start time'
            raise refusal(accepted, "which windows?")
        return self

    @property
    def arguments(self) -> Arguments:
        """The question's fields; see `parse_question`."""
        return {name: getattr(self, name) for name in _ARGUMENTS if name in self.model_fields_set}

    @property
    def windows_text(self) -> str:
        """Which windows are selected, for messages."""
        if self.latest is not None:
            return "(of the latest)"
        return f"that contains {self.at_ms} ms" if self.at_ms is not None else f"that starts at {self.start_ms} ms"

    def of_second(self) -> QuestionLine:
        """The same question with the measure and group of the second synopsis; without a group, of all groups."""
        assert self.second is not None
        own = {"measure": self.second.measure, "group": self.second.group, "is_global": self.second.group is None}
        return self.model_copy(update=own)


def read_question(fields: object) -> QuestionLine:
    """Reads a question as documented in `docs/reference/query.md`.

    Raises:
        InvalidRequest: names the field, its value and the accepted values.
    """
    if not isinstance(fields, dict):
        raise InvalidRequest("", fields, 'an object, such as {"id": 1, "latest": 1, "measure": "n"}')
    try:
        return validate(QuestionLine, fields)
    except InvalidConfig as exc:
        raise InvalidRequest(exc.field, exc.value, exc.accepted, exc.reason) from None


def parse_questions(body: bytes, *, by_line: bool) -> list[object]:
    """Parses the questions of a request: a question, a list of questions, or a question per line.

    They can be serialised again, because answers repeat parts of them. Empty lines are left out.

    Raises:
        InvalidRequest: the body is not JSON, or has more than `MAX_QUESTIONS` questions.
    """
    if by_line:
        lines = enumerate(body.split(b"\n"), 1)
        questions = [_parse_json(f"line {number}", line) for number, line in lines if line.strip()]
    else:
        given = _parse_json("", body)
        questions = given if isinstance(given, list) else [given]
    if len(questions) > MAX_QUESTIONS:
        raise InvalidRequest("", f"{len(questions)} questions", f"at most {MAX_QUESTIONS:,} questions")
    return questions


def _parse_json(field: str, text: bytes) -> object:
    try:
        value = load_json(text)
        json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest(field, text[:80].decode(errors="replace"), "JSON", str(exc)) from exc

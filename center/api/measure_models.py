"""OpenAPI models of a measure's cell and of the lines of a stream of questions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

Rfc3339 = Annotated[str, Field(examples=["2013-01-01T06:00:00Z"])]


class ApiModel(BaseModel):
    """Base of the models of the API. OpenAPI shows the docstrings of their members."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class WindowRange(ApiModel):
    start: Rfc3339
    end: Rfc3339


class IntervalCell(ApiModel):
    """A value that lies in [lower, upper] at the answer's confidence. Null: unknown, or there is no value."""

    estimate: float | int | None
    lower: float | int | None
    upper: float | int | None


class ItemCell(IntervalCell):
    """The frequency of an item, or its membership (1 or 0)."""

    item: str | int | float | bool | None


class MeasureCell(ApiModel):
    """A measure's value in a row. `shapes` of the answer states its members: they depend on the function and on
    the questions. An interval itself has the members below.
    """

    model_config = ConfigDict(extra="allow")

    estimate: float | int | None = None
    lower: float | int | None = None
    upper: float | int | None = None


class PartShape(ApiModel):
    """The form of one member of a measure's cell, so that readers need not know the measure's function."""

    name: str
    """The member; empty: the cell itself is the interval."""
    shape: Literal["interval", "number", "keyed", "items", "list"]
    """`interval`: an estimate with bounds. `number`: a number or a text. `keyed`: an interval per key. `items`: a list
    with an interval per requested item, in the same order in every row. `list`: a list of any length, whose entries may
    be intervals with further members."""
    columns: list[str]
    """The member's columns in Arrow, CSV and SELECT, without the columns of bounds (`_lower`, `_upper`)."""


class AnswerRow(ApiModel):
    """A group, and a `MeasureCell` per measure of the query."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, MeasureCell] = Field(init=False)

    group: dict[str, JsonValue]


class SecondSynopsisModel(ApiModel):
    """The second synopsis of a question about two; of the same window."""

    query: str
    measure: str | None = None
    group: dict[str, JsonValue] | None = None
    """Null: all groups merged."""


class QuestionLine(ApiModel):
    """One question of a stream; exactly one of `latest`, `at` and `window` is set."""

    id: Any = None
    """Repeated in the answer."""
    latest: int | None = Field(default=None, ge=1, le=1000)
    """The last n windows."""
    at: str | int | None = None
    """Every window that contains this time."""
    window: str | int | None = None
    """The window that starts at this time."""
    measure: str | None = None
    """Optional if the query has only one."""
    question: str | None = None
    """count, sum, mean, variance, min, max, distinct, quantile (`q`), rank (`x`), frequency (`item`), contains
    (`item`), range and proportion (`lo`, `hi`), top (`k`), self_join_size, false_positive_rate; join_size, union_size
    and intersection_size (`with`). Null: the measure's default."""
    item: Any = None
    q: float | None = None
    x: float | None = None
    lo: float | None = None
    hi: float | None = None
    k: int | None = None
    group: dict[str, JsonValue] | None = None
    """Only groups with these values."""
    global_: bool = Field(default=False, alias="global")
    """All groups merged."""
    merge: bool = False
    """All windows merged."""
    confidence: float | None = Field(default=None, gt=0, lt=1)
    with_: SecondSynopsisModel | None = Field(default=None, alias="with")


class EvaluatedLine(ApiModel):
    """The answer to a question over one window, or an `error` in its place."""

    id: Any
    error: dict[str, JsonValue] | None = None
    """Problem details (RFC 9457)."""
    query: str | None = None
    measure: str | None = None
    question: str | None = None
    group: dict[str, JsonValue] | None = None
    window: WindowRange | None = None
    windows: list[dict[str, JsonValue]] | None = None
    """With `merge`: start and revision of each."""
    phase: Literal["early", "complete", "final"] | None = None
    revision: int | None = None
    completeness: dict[str, JsonValue] | None = None
    estimate: float | int | None = None
    lower: float | int | None = None
    upper: float | int | None = None
    top: list[ItemCell] | None = None
    data: list[dict[str, JsonValue]] | None = None
    """A row per group: `group`, and an interval."""
    confidence: float | None = None
    basis: str | None = None
    """Source of the interval."""

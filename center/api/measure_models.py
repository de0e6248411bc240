"""OpenAPI models of a measure's cell and of the answers to questions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from edgewater.model.json_types import IntervalCell
from edgewater.model.replies import WindowSpan

Rfc3339 = Annotated[str, Field(examples=["2013-01-01T06:00:00Z"])]


class ApiModel(BaseModel):
    """Base of the models of the API. OpenAPI shows the docstrings of their members."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class Params(ApiModel):
    """Base of the parameters of an endpoint, which has no others."""

    model_config = ConfigDict(extra="forbid")


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


class AnswerRow(ApiModel):
    """A group, and a `MeasureCell` per measure of the query."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, MeasureCell] = Field(init=False)

    group: dict[str, JsonValue]


class EvaluatedLine(ApiModel):
    """The answer to a question over one window, or an `error` in its place."""

    id: Any
    error: dict[str, JsonValue] | None = None
    """Problem details (RFC 9457)."""
    query: str | None = None
    measure: str | None = None
    question: str | None = None
    group: dict[str, JsonValue] | None = None
    window: WindowSpan | None = None
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

"""OpenAPI models of explanations: a value's error by cause, completeness by window, budgets, a query before it runs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, JsonValue

from center.api.measure_models import ApiModel, Rfc3339, WindowRange
from edgewater.model.json_types import Key
from edgewater.model.replies import Column, DryRunEdge, ErrorPart, ExplainedEdge, ExplainedRevision, Sides

Phase = Literal["early", "complete", "final"]


class Explanation(ApiModel):
    """Why a value is what it is. The parts bound the error by cause; they do not add up to the interval in general."""

    query: str
    window: WindowRange
    phase: Phase
    revision: int
    given_at: Rfc3339
    measure: str
    value: str
    """Which value of the measure, such as `quantiles 0.5`; empty: it has one value."""
    group: dict[str, Key]
    groups: int
    """Selected groups. The group with the widest interval is explained."""
    estimate: float | int | None
    lower: float | int | None
    upper: float | int | None
    not_finite: str | None = None
    """NaN, Infinity or -Infinity, for which JSON has no number: `estimate` is null."""
    confidence: float | None
    parts: list[ErrorPart]
    edges: list[ExplainedEdge]
    revisions: list[ExplainedRevision]
    """The last revisions, ascending."""
    contract: dict[str, JsonValue]
    coverage: float | None
    """Fraction of recent final windows whose first interval contained the true value. Null: unknown."""


class CompletenessMatrix(ApiModel):
    """A character per window, of each edge and of the phases."""

    query: str
    windows: list[Rfc3339]
    """Starts, ascending."""
    edges: dict[str, str] = Field(examples=[{"jfk": "cccm"}])
    """`c`: closed with all its records; `m`: missing; `i`: input may be lost; `s`: state lost; `l`: left; `-`: was not
    expected; `?`: unknown."""
    phases: str = Field(examples=["ffce"])
    """`e`: early, `c`: complete, `f`: final."""
    ratios: list[float]
    earlier: bool
    """The range has earlier windows, beyond `limit`."""


class PendingGrant(ApiModel):
    shares: dict[str, float]
    from_: Rfc3339 | None = Field(alias="from")
    """First slice to which it applies. Null: all slices."""


class EdgeBudget(ApiModel):
    """An edge's part of a query's error budget, per measure."""

    edge: str
    granted: dict[str, float] | None = None
    """The last granted share. Null: none yet."""
    in_force: dict[str, float] | None = None
    """The most that it may withhold of a new slice, without what is pending. Null: unknown."""
    pending: PendingGrant | None = None
    """A granted, unconfirmed share. It counts in addition."""
    from_: Rfc3339 | None = Field(default=None, alias="from")
    """First slice of `in_force`. Null: all slices."""
    heard_at: Rfc3339 | None = None
    """Of its last report."""
    withheld_last: dict[str, Sides] | None
    """What it withholds of the last window that has an answer. Null: unknown."""
    rate: float | None
    """As in an explanation."""
    wire_bytes: int
    """Applied so far."""


class QueryBudget(ApiModel):
    """A query's error budget and how it is divided."""

    query: str
    budget: JsonValue
    """As registered."""
    limits: dict[str, float]
    """Per measure; in its unit."""
    divided: list[str]
    """Measures whose limit the edges share; each may use the others in full."""
    sums: dict[str, float]
    """Per divided measure, the most that all edges together may withhold of a new slice; never more than the limit."""
    window: Rfc3339 | None
    """The window of `withheld_last`."""
    edges: list[EdgeBudget]


class DryRun(ApiModel):
    """What a registration would do; nothing is registered."""

    spec: dict[str, JsonValue]
    """In canonical form."""
    sql: str
    """The same query in SQL, without its seed."""
    columns: list[Column]
    """Of the table of its answers, which SELECT reads."""
    registered: bool
    """Whether the same query is already registered."""
    begins: str | None
    """The border: the query has the windows that start from then on. Null: all."""
    until: str | None
    """The query has the windows that start before. Null: it has no end."""
    refused: str | None
    """Why the registration would be refused: what an edge serves does not fit."""
    entry_bytes: dict[str, int]
    """Per measure, about, of a new group in a frame; sparse synopses grow with their values."""
    notes: list[str]
    edges: list[DryRunEdge]


class FunctionParameter(ApiModel):
    name: str
    default: Any
    """Null: it is required."""
    accepted: str


class FunctionEntry(ApiModel):
    """A function that a query's measure may call."""

    name: str
    argument: Literal["none", "optional", "required", "rows"]
    types: list[str]
    """Of the argument."""
    parameters: list[FunctionParameter]
    goals: list[str]
    """Accuracy goals that it accepts in place of parameters."""
    interval: Literal["exact", "sketch", "sample"] | None
    """Where its own error comes from. `exact`: there is none but rounding. Null: unknown."""
    error_budget: Literal["sum", "extremum"] | None
    """How an error budget divides among edges: in shares, or each uses it in full. Null: it takes none."""
    origin: str


class FunctionList(ApiModel):
    functions: list[FunctionEntry]

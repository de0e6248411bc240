"""OpenAPI models of explanations: a value's error by cause, completeness by window, budgets, a query before it runs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, JsonValue

from center.api.edge_progress import EdgeState
from center.api.measure_models import IntervalCell, Rfc3339, WindowRange
from center.api.models import Column
from edgewater.model.json_types import Key

Phase = Literal["early", "complete", "final"]


class ErrorPart(BaseModel):
    """The part of an interval that one cause makes."""

    cause: Literal["sketch", "sampling", "withheld", "straggler", "missing"]
    above: float | None = Field(description="How far the true value may be above the estimate. Null: unknown.")
    below: float | None
    known: bool = Field(description="Both are known.")
    says: str


class Sides(BaseModel):
    above: float | None
    below: float | None


class ExplainedEdge(BaseModel):
    """What an edge had stated when the answer was given, and its state now."""

    edge: str
    state: EdgeState | Literal["never_connected"] = Field(description="Now.")
    watermark: Rfc3339 | None = Field(
        description="Of the stream, as far as the center knows by a heartbeat or the answer itself. Null: none yet, or"
        " the stream has ended."
    )
    ended: bool = Field(description="The edge has read the stream to its end.")
    closed: bool | None = Field(description="Whether it had closed the window with all its records. Null: unknown.")
    closed_until: Rfc3339 | None = Field(
        description="If it had not: event time before which it had closed everything. Null: unknown."
    )
    late: int | None = Field(description="Its records that arrived after their slice's close. Null: unknown.")
    withheld: Sides | None = Field(description="What it withholds of a group, at most. Null: unknown.")
    rate: float | None = Field(
        description="Fraction of records that the accuracy needs processed, now. The edge samples only if it has to."
        " Null: the query has no accuracy, or the rate is not known yet."
    )


class ExplainedRevision(IntervalCell):
    """The same value in one revision; null: the revision has no such group."""

    revision: int
    phase: Phase
    given_at: Rfc3339
    not_finite: str | None = None


class Explanation(BaseModel):
    """Why a value is what it is. The parts bound the error by cause; they do not add up to the interval in general."""

    query: str
    window: WindowRange
    phase: Phase
    revision: int
    given_at: Rfc3339
    measure: str
    value: str = Field(description="Which value of the measure, such as `quantiles 0.5`; empty: it has one value.")
    group: dict[str, Key]
    groups: int = Field(description="Selected groups. The group with the widest interval is explained.")
    estimate: float | int | None
    lower: float | int | None
    upper: float | int | None
    not_finite: str | None = Field(
        default=None, description="NaN, Infinity or -Infinity, for which JSON has no number: `estimate` is null."
    )
    confidence: float | None
    parts: list[ErrorPart]
    edges: list[ExplainedEdge]
    revisions: list[ExplainedRevision] = Field(description="The last revisions, ascending.")
    contract: dict[str, JsonValue]
    coverage: float | None = Field(
        description="Fraction of recent final windows whose first interval contained the true value. Null: unknown."
    )


class CompletenessMatrix(BaseModel):
    """A character per window, of each edge and of the phases."""

    query: str
    windows: list[Rfc3339] = Field(description="Starts, ascending.")
    edges: dict[str, str] = Field(
        description="`c`: closed with all its records; `m`: missing; `i`: input may be lost; `s`: state lost;"
        " `l`: left; `-`: was not expected; `?`: unknown.",
        examples=[{"jfk": "cccm"}],
    )
    phases: str = Field(description="`e`: early, `c`: complete, `f`: final.", examples=["ffce"])
    ratios: list[float]
    earlier: bool = Field(description="The range has earlier windows, beyond `limit`.")


class PendingGrant(BaseModel):
    shares: dict[str, float]
    from_: Rfc3339 | None = Field(alias="from", description="First slice to which it applies. Null: all slices.")


class EdgeBudget(BaseModel):
    """An edge's part of a query's error budget, per measure."""

    edge: str
    granted: dict[str, float] | None = Field(default=None, description="The last granted share. Null: none yet.")
    in_force: dict[str, float] | None = Field(
        default=None,
        description="The most that it may withhold of a new slice, without what is pending. Null: unknown.",
    )
    pending: PendingGrant | None = Field(
        default=None, description="A granted, unconfirmed share. It counts in addition."
    )
    from_: Rfc3339 | None = Field(
        default=None, alias="from", description="First slice of `in_force`. Null: all slices."
    )
    heard_at: Rfc3339 | None = Field(default=None, description="Of its last report.")
    withheld_last: dict[str, Sides] | None = Field(
        description="What it withholds of the last window that has an answer. Null: unknown."
    )
    rate: float | None = Field(description="As in an explanation.")
    wire_bytes: int = Field(description="Applied so far.")


class QueryBudget(BaseModel):
    """A query's error budget and how it is divided."""

    query: str
    budget: JsonValue = Field(description="As registered.")
    limits: dict[str, float] = Field(description="Per measure; in its unit.")
    divided: list[str] = Field(description="Measures whose limit the edges share; each may use the others in full.")
    sums: dict[str, float] = Field(
        description="Per divided measure, the most that all edges together may withhold of a new slice; never more than"
        " the limit."
    )
    window: Rfc3339 | None = Field(description="The window of `withheld_last`.")
    edges: list[EdgeBudget]


class DryRunEdge(BaseModel):
    edge: str
    accepted: bool | None = Field(
        description="Whether its stream has the columns that the query needs. Null: it has never connected."
    )
    code: str | None = None
    message: str | None = None


class DryRun(BaseModel):
    """What a registration would do; nothing is registered."""

    spec: dict[str, JsonValue] = Field(description="In canonical form.")
    sql: str = Field(description="The same query in SQL, without its seed.")
    columns: list[Column] = Field(description="Of the table of its answers, which SELECT reads.")
    registered: bool = Field(description="Whether the same query is already registered.")
    begins: str | None = Field(description="The border: the query has the windows that start from then on. Null: all.")
    until: str | None = Field(description="The query has the windows that start before. Null: it has no end.")
    refused: str | None = Field(description="Why the registration would be refused: what an edge serves does not fit.")
    entry_bytes: dict[str, int] = Field(
        description="Per measure, about, of a new group in a frame; sparse synopses grow with their values."
    )
    notes: list[str]
    edges: list[DryRunEdge]


class FunctionParameter(BaseModel):
    name: str
    default: Any = Field(description="Null: it is required.")
    accepted: str


class FunctionEntry(BaseModel):
    """A function that a query's measure may call."""

    name: str
    argument: Literal["none", "optional", "required", "rows"]
    types: list[str] = Field(description="Of the argument.")
    parameters: list[FunctionParameter]
    goals: list[str] = Field(description="Accuracy goals that it accepts in place of parameters.")
    interval: Literal["exact", "sketch", "sample"] | None = Field(
        description="Where its own error comes from. `exact`: there is none but rounding. Null: unknown."
    )
    error_budget: Literal["sum", "extremum"] | None = Field(
        description="How an error budget divides among edges: in shares, or each uses it in full. Null: it takes none."
    )
    origin: str


class FunctionList(BaseModel):
    functions: list[FunctionEntry]

"""The budgets that a plan tries: asked for, or a sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from edgewater.errors import InvalidConfig
from edgewater.quantities import duration_ms, fraction, size_bytes
from edgewater.query import Budget as QueryBudget
from edgewater.query import ErrorBudget, QuerySpec, StalenessBudget

Kind = Literal["error", "staleness"]
ERROR_SHARES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
STALENESS_SHARES = (0.003, 0.01, 0.03, 0.1, 0.3)
BUDGET_ACCEPTED = (
    "an amount in the measure's own unit such as 1000 or 1MB, or a share of the largest possible error from 0% to 100%"
)
STALENESS_ACCEPTED = "a duration such as 2s, or a share of the window such as 10%"


@dataclass(frozen=True, slots=True)
class Budget:
    """One budget of a plan.

    Attributes:
        size: error: as a share of the largest possible error; staleness: in windows.
        amount: error: in the measure's unit; staleness: in ms.
        own: is it the query's own?
    """

    kind: Kind
    size: float
    amount: float
    own: bool = False

    def of(self, measure: str) -> QueryBudget:
        """As a query has it."""
        if self.kind == "staleness":
            return StalenessBudget(int(self.amount))
        return ErrorBudget(((measure, self.amount),))


def budgets(errors: Sequence[str], stalenesses: Sequence[str], query: QuerySpec, largest: float) -> list[Budget]:
    """The budgets to try, smallest first; the query's own is marked, and part of a sweep.

    Args:
        errors, stalenesses: as given on the command line. None of either: a sweep of the kind the query
            has, which is error if it has none.
        largest: the largest possible error, that of an answer that lacks the largest group.

    Raises:
        InvalidConfig: names the flag, the value and what is accepted.
    """
    window_ms = query.window.longest_ms
    own = _own(query, largest)
    if errors or stalenesses:
        chosen = [_error(text, largest) for text in errors] + [_staleness(text, window_ms) for text in stalenesses]
    elif own is not None and own.kind == "staleness":
        lengths = sorted({max(1, round(share * window_ms)) for share in STALENESS_SHARES})
        chosen = [Budget("staleness", ms / window_ms, ms) for ms in lengths]
    else:
        chosen = [Budget("error", share, share * largest) for share in ERROR_SHARES]
    unique = {(b.kind, b.amount): b for b in chosen}
    if own is not None and ((own.kind, own.amount) in unique or not (errors or stalenesses)):
        unique[own.kind, own.amount] = own
    return sorted(unique.values(), key=lambda b: (b.kind, b.amount))


def _own(query: QuerySpec, largest: float) -> Budget | None:
    """None also for relative limits, which the offline policies do not know, and those of other measures."""
    if isinstance(query.budget, StalenessBudget):
        ms = query.budget.staleness_ms
        return Budget("staleness", ms / query.window.longest_ms, ms, own=True)
    limit = dict(query.budget.limits).get(query.measures[0].name) if query.budget is not None else None
    return None if limit is None else Budget("error", limit / largest, limit, own=True)


def _error(text: str, largest: float) -> Budget:
    share = fraction(text)
    if share is not None:
        if not 0.0 <= share <= 1.0:
            raise InvalidConfig("--budget", text, BUDGET_ACCEPTED)
        return Budget("error", share, share * largest)
    try:
        amount = float(text)
    except ValueError:
        try:
            amount = float(size_bytes(text, "--budget", InvalidConfig))
        except InvalidConfig as exc:
            raise InvalidConfig("--budget", text, BUDGET_ACCEPTED) from exc
    if not 0.0 <= amount < math.inf:
        raise InvalidConfig("--budget", text, BUDGET_ACCEPTED)
    return Budget("error", amount / largest, amount)


def _staleness(text: str, window_ms: int) -> Budget:
    share = fraction(text)
    if share is not None:
        ms = round(share * window_ms)
        if not (share > 0.0 and ms >= 1):
            raise InvalidConfig("--staleness", text, STALENESS_ACCEPTED, "it is less than a millisecond")
        return Budget("staleness", ms / window_ms, ms)
    try:
        ms = duration_ms(text, "--staleness", InvalidConfig, minimum_ms=1)
    except InvalidConfig as exc:
        raise InvalidConfig("--staleness", text, STALENESS_ACCEPTED, exc.reason) from exc
    return Budget("staleness", ms / window_ms, ms)


def bandwidth(text: str) -> int:
    """Bytes per second of one edge's link. Raises InvalidConfig."""
    accepted = "bytes per second of each edge's link, such as 64KiB or 1MB"
    try:
        size = size_bytes(text.removesuffix("/s"), "--bandwidth", InvalidConfig)
    except InvalidConfig as exc:
        raise InvalidConfig("--bandwidth", text, accepted) from exc
    if size < 1:
        raise InvalidConfig("--bandwidth", text, accepted, "nothing would ever arrive")
    return size

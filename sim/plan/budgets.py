"""The budgets that a plan tries: budgets of the command line, or a sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from edgewater.base.errors import InvalidConfig
from edgewater.base.quantities import duration_ms, fraction, size_bytes
from edgewater.model.query import Budget, CombinedBudget, ErrorBudget, QuerySpec, StalenessBudget

Kind = Literal["error", "staleness", "combined"]
ERROR_SHARES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
STALENESS_SHARES = (0.003, 0.01, 0.03, 0.1, 0.3)
BUDGET_ACCEPTED = "an amount in the measure's unit such as 1000 or 1MB, or 0% to 100% of the largest possible error"
STALENESS_ACCEPTED = "a duration such as 2s, or a percentage of the window such as 10%"


@dataclass(frozen=True, slots=True)
class PlannedBudget:
    """One budget of a plan.

    Attributes:
        size: an error as a fraction of the largest possible error; a staleness in windows. Of a combined budget, the
            error.
        amount: an error in the measure's unit; a staleness in ms.
        of_query: whether it is the budget of the query itself.
        staleness_ms: the staleness of a combined budget.
    """

    kind: Kind
    size: float
    amount: float
    of_query: bool = False
    staleness_ms: int | None = None

    def for_query(self, measure: str) -> Budget:
        """Returns the budget for a query with this measure."""
        if self.kind == "staleness":
            return StalenessBudget(int(self.amount))
        error = ErrorBudget(((measure, self.amount),))
        return error if self.staleness_ms is None else CombinedBudget(error, StalenessBudget(self.staleness_ms))

    def with_staleness(self, ms: int) -> PlannedBudget:
        return replace(self, kind="combined", staleness_ms=ms)


def budgets(errors: Sequence[str], stalenesses: Sequence[str], query: QuerySpec, largest: float) -> list[PlannedBudget]:
    """Returns the budgets to try, smallest first. A sweep includes the query's own budget. If that one is combined,
    each error is combined with each staleness.

    Args:
        errors, stalenesses: budgets from the command line. If both are empty: a sweep of the query's kind of budget,
            error by default.
        largest: the largest possible error, which is the error of an answer without the largest group.

    Raises:
        InvalidConfig: names the flag, the value and the accepted values.
    """
    window_ms = query.window.longest_ms
    own = _own(query, largest)
    if own is not None and own.kind == "combined":
        chosen = _combined(errors, stalenesses, own, largest, window_ms)
    elif errors or stalenesses:
        chosen = [_error(text, largest) for text in errors] + [_staleness(text, window_ms) for text in stalenesses]
    elif own is not None and own.kind == "staleness":
        lengths = sorted({max(1, round(share * window_ms)) for share in STALENESS_SHARES})
        chosen = [PlannedBudget("staleness", ms / window_ms, ms) for ms in lengths]
    else:
        chosen = [PlannedBudget("error", share, share * largest) for share in ERROR_SHARES]
    unique = {_key(b): b for b in chosen}
    if own is not None and (_key(own) in unique or not (errors or stalenesses)):
        unique[_key(own)] = own
    return sorted(unique.values(), key=_key)


def _key(budget: PlannedBudget) -> tuple[str, int, float]:
    return budget.kind, budget.staleness_ms or 0, budget.amount


def _combined(
    errors: Sequence[str], stalenesses: Sequence[str], own: PlannedBudget, largest: float, window_ms: int
) -> list[PlannedBudget]:
    """Returns each error with each staleness. Without a given staleness: the query's."""
    lengths = sorted({int(_staleness(text, window_ms).amount) for text in stalenesses})
    if not lengths and own.staleness_ms is not None:
        lengths = [own.staleness_ms]
    amounts = [_error(text, largest) for text in errors]
    amounts = amounts or [PlannedBudget("error", share, share * largest) for share in ERROR_SHARES]
    return [amount.with_staleness(ms) for ms in lengths for amount in amounts]


def _own(query: QuerySpec, largest: float) -> PlannedBudget | None:
    """Returns the query's own budget; None for relative limits, which offline policies do not support."""
    if isinstance(query.budget, StalenessBudget):
        ms = query.budget.staleness_ms
        return PlannedBudget("staleness", ms / query.window.longest_ms, ms, of_query=True)
    limit = dict(query.error_budget.limits).get(query.measures[0].name) if query.error_budget is not None else None
    if limit is None:
        return None
    own = PlannedBudget("error", limit / largest, limit, of_query=True)
    return own if query.staleness_budget is None else own.with_staleness(query.staleness_budget.staleness_ms)


def _error(text: str, largest: float) -> PlannedBudget:
    share = fraction(text)
    if share is not None:
        if not 0.0 <= share <= 1.0:
            raise InvalidConfig("--budget", text, BUDGET_ACCEPTED)
        return PlannedBudget("error", share, share * largest)
    try:
        amount = float(text)
    except ValueError:
        try:
            amount = float(size_bytes(text, "--budget", InvalidConfig))
        except InvalidConfig as exc:
            raise InvalidConfig("--budget", text, BUDGET_ACCEPTED) from exc
    if not 0.0 <= amount < math.inf:
        raise InvalidConfig("--budget", text, BUDGET_ACCEPTED)
    return PlannedBudget("error", amount / largest, amount)


def _staleness(text: str, window_ms: int) -> PlannedBudget:
    share = fraction(text)
    if share is not None:
        ms = round(share * window_ms)
        if not (share > 0.0 and ms >= 1):
            raise InvalidConfig("--staleness", text, STALENESS_ACCEPTED, "it is below one millisecond")
        return PlannedBudget("staleness", ms / window_ms, ms)
    try:
        ms = duration_ms(text, "--staleness", InvalidConfig, minimum_ms=1)
    except InvalidConfig as exc:
        raise InvalidConfig("--staleness", text, STALENESS_ACCEPTED, exc.reason) from exc
    return PlannedBudget("staleness", ms / window_ms, ms)


def bandwidth(text: str) -> int:
    """Returns the bytes per second of one edge's link. Raises InvalidConfig."""
    accepted = "bytes per second of each edge's link, such as 64KiB or 1MB"
    try:
        size = size_bytes(text.removesuffix("/s"), "--bandwidth", InvalidConfig)
    except InvalidConfig as exc:
        raise InvalidConfig("--bandwidth", text, accepted) from exc
    if size < 1:
        raise InvalidConfig("--bandwidth", text, accepted, "it must be positive")
    return size

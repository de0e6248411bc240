"""Error budgets of maxima, where an edge has sent nothing of a group.

An edge may withhold a maximum of at most its limit without ever sending any value of the group. Where no edge has sent
one, the group is not in the answer. Where another edge has sent a maximum below 0, the answer's error is not the
withheld amount but the distance between the two, which only the center can tell: it judges the contract by the values
of the answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from center.ledger import Violation, with_violations
from edgewater.query import ErrorBudget, QuerySpec
from edgewater.synopses import MaxStack, Stack


@dataclass(frozen=True, slots=True)
class UnsentMaximum:
    """The maxima of one measure of which edges sent nothing.

    Attributes:
        largest: the largest of them.
        least_estimate: the least value of a group in the answer.
    """

    largest: float
    least_estimate: float

    @classmethod
    def of_all(cls, withheld: Mapping[str, Any], stacks: Mapping[str, Stack]) -> dict[str, UnsentMaximum]:
        """Per measure.

        Args:
            withheld: as in the answer's quality.
            stacks: all groups of the answer.
        """
        result = {}
        for name, bound in withheld.items():
            if "unsent" in bound and isinstance(stacks[name], MaxStack):
                values = stacks[name].query().value
                least = float(values[~np.isnan(values)].min(initial=np.inf))
                result[name] = cls(math.inf if bound["unsent"] is None else bound["unsent"], least)
        return result


def with_unsent_maxima(
    contract: Mapping[str, Any], spec: QuerySpec, unsent: Mapping[str, UnsentMaximum]
) -> dict[str, Any]:
    """The contract, with a violation for each measure of which a group may be further from the truth than its limit."""
    violations = []
    budget = spec.error_budget or ErrorBudget(())
    limits, relative = dict(budget.limits), dict(budget.relative)
    for name, maximum in unsent.items():
        # A relative limit permits to withhold a maximum of 0 only, which is the true one of any group below 0.
        limit = limits.get(name, 0.0 if name in relative else math.inf)
        error = maximum.largest - maximum.least_estimate
        if not error <= limit * (1 + 1e-9):  # of NaN too
            message = (
                f"{name}: a group has {maximum.least_estimate:g}, and an edge withholds a maximum of "
                f"{maximum.largest:g}, of which it sent nothing; the error may be {error:g}"
            )
            violations.append(Violation("error-budget", message))
    return with_violations(contract, violations)

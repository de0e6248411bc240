"""The `cache` of a query: the policies by which an edge's cache selects entries to send.

The policies have the names of Heintz et al., TR 16-003. `edge/cache/` implements them. The defaults were the
best in measurements (`docs/decisions/0006-budgets-and-early-sends.md`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from edgewater.base.errors import InvalidQuery, did_you_mean
from edgewater.base.quantities import fraction, require_keys

EVICTIONS = ("gain", "lru", "spe", "mae", "rate")
SIZINGS = ("target", "prev_window", "linear", "pure_pess")
ESTIMATES = ("acc", "explicit")
DEFAULT_EAGER = 0.02


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The cache policies of one query.

    Attributes:
        eviction: the order in which entries are sent from the primary cache while their slice is open.
        sizing: the rule for the size of the primary cache, for staleness budgets.
        estimate: the initial prefix error by which the primary cache is filled, for staleness budgets.
        eager: for the eviction `gain`, a probability. An entry of an open slice is sent if sending it saves an update
            after the slice's end with at least this probability. Without a staleness budget, the threshold is ten times
            as high.
    """

    eviction: str = EVICTIONS[0]
    sizing: str = SIZINGS[0]
    estimate: str = ESTIMATES[0]
    eager: float = DEFAULT_EAGER

    @classmethod
    def from_mapping(cls, mapping: object) -> CacheSpec:
        """Reads ``cache: {eviction: lru, sizing: linear, estimate: acc, eager: 10%}``. All keys are optional.

        Raises:
            InvalidQuery: names the field, its value and what is accepted.
        """
        if mapping is None:
            return cls()
        keys = {"eviction": False, "sizing": False, "estimate": False, "eager": False}
        fields = require_keys(mapping, "cache", keys, InvalidQuery)
        return cls(
            _one_of(fields.get("eviction", cls().eviction), "cache.eviction", EVICTIONS),
            _one_of(fields.get("sizing", cls().sizing), "cache.sizing", SIZINGS),
            _one_of(fields.get("estimate", cls().estimate), "cache.estimate", ESTIMATES),
            _eager(fields.get("eager", DEFAULT_EAGER)),
        )

    def to_mapping(self) -> dict[str, Any]:
        """Returns the keys that differ from the defaults, as a mapping that `from_mapping` accepts."""
        default = CacheSpec()
        return {
            name: getattr(self, name)
            for name in ("eviction", "sizing", "estimate", "eager")
            if getattr(self, name) != getattr(default, name)
        }


def format_fraction(share: float) -> str:
    """Returns the percentage that `quantities.fraction` parses to exactly `share`."""
    percent = share * 100.0
    near = (percent, math.nextafter(percent, math.inf), math.nextafter(percent, -math.inf))
    return f"{next((p for p in near if p / 100.0 == share), percent)!r}%"


def _one_of(value: object, at: str, names: tuple[str, ...]) -> str:
    if value not in names:
        raise InvalidQuery(at, value, f"one of {', '.join(names)}", did_you_mean(value, names).removeprefix(", "))
    return str(value)


def _eager(value: object) -> float:
    share = fraction(value)
    if share is None and isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        share = float(value)
    if share is None or not 0.0 <= share <= 1.0:
        raise InvalidQuery("cache.eager", value, "a probability such as 10% or 0.1, from 0 to 1")
    return share

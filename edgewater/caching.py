"""How an edge's cache decides what leaves and when, as a query may choose it (`cache:`).

Every policy of TR 16-003 has its name here; what each one does is in `edge/cache/`. Without a choice a
query gets the defaults, which are the ones measured to be best (`docs/decisions/0005-cache-policy.md`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from edgewater.errors import InvalidQuery
from edgewater.quantities import fraction, require_keys

EVICTIONS = ("gain", "lru", "spe", "mae", "rate")
SIZINGS = ("target", "prev_window", "linear", "pure_pess")
ESTIMATES = ("acc", "explicit")
DEFAULT_EAGER = 0.02


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The choice of policies for one query.

    Attributes:
        eviction: the order in which entries leave the primary cache while their slice is open.
        sizing: staleness budgets only: how large the primary cache is.
        estimate: staleness budgets only: the initial prefix error by which the primary cache is filled.
        eager: for the eviction `gain`: an entry of an open slice leaves when the probability that this
            spares the link a flush after the slice's end is at least this. 0: whenever the link is idle.
    """

    eviction: str = EVICTIONS[0]
    sizing: str = SIZINGS[0]
    estimate: str = ESTIMATES[0]
    eager: float = DEFAULT_EAGER

    @classmethod
    def from_mapping(cls, given: object) -> CacheSpec:
        """Reads ``cache: {eviction: lru, sizing: linear, estimate: acc, eager: 10%}``; all keys optional.

        Raises:
            InvalidQuery: names the field, its value and what is accepted.
        """
        if given is None:
            return cls()
        keys = {"eviction": False, "sizing": False, "estimate": False, "eager": False}
        c = require_keys(given, "cache", keys, InvalidQuery)
        return cls(
            _one_of(c.get("eviction", cls().eviction), "cache.eviction", EVICTIONS),
            _one_of(c.get("sizing", cls().sizing), "cache.sizing", SIZINGS),
            _one_of(c.get("estimate", cls().estimate), "cache.estimate", ESTIMATES),
            _eager(c.get("eager", DEFAULT_EAGER)),
        )

    def to_mapping(self) -> dict[str, Any]:
        """What differs from the defaults; `from_mapping` reads it back."""
        default = CacheSpec()
        return {
            name: getattr(self, name)
            for name in ("eviction", "sizing", "estimate", "eager")
            if getattr(self, name) != getattr(default, name)
        }


def format_fraction(share: float) -> str:
    """The percentage that `quantities.fraction` reads back as exactly `share`."""
    percent = share * 100.0
    near = (percent, math.nextafter(percent, math.inf), math.nextafter(percent, -math.inf))
    return f"{next((p for p in near if p / 100.0 == share), percent)!r}%"


def _one_of(value: object, at: str, names: tuple[str, ...]) -> str:
    if value not in names:
        raise InvalidQuery(at, value, f"one of {', '.join(names)}")
    return str(value)


def _eager(value: object) -> float:
    share = fraction(value)
    if share is None and isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        share = float(value)
    if share is None or not 0.0 <= share <= 1.0:
        raise InvalidQuery("cache.eager", value, "a probability such as 10% or 0.1, from 0 to 1")
    return share

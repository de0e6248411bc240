"""A value with two bounds, and comparisons that respect the bounds (`Interval`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from edgewater.base.errors import EdgewaterError

Number = int | float


class Undecided(EdgewaterError):
    """The bounds do not decide the comparison."""

    code = "undecided"


@dataclass(frozen=True, slots=True, eq=False)
class Interval:
    """A value in [lower, upper].

    A comparison returns True or False if the result is the same for every value within the bounds, at their confidence.
    Otherwise it raises `Undecided`. There is no hash and no truth value, because both would need equality.

    Attributes:
        estimate: the estimate; None if there is no value, such as the mean of no records.
        lower, upper: the bounds; None if unknown.
        confidence: the probability that the bounds hold; 1 if they always hold; None if no bound is known.

    >>> flights = Interval(estimate=5, lower=5, upper=7, confidence=0.95)
    >>> flights > 4
    True
    >>> flights > 6
    Traceback (most recent call last):
    edgewater.client.interval.Undecided: 5 [5, 7] > 6: the bounds do not decide it; compare .lower, .upper or .estimate
    >>> 6 in flights, flights.width, flights.is_exact
    (True, 2, False)
    """

    estimate: Number | None
    lower: Number | None
    upper: Number | None
    confidence: float | None = None

    __hash__ = None  # type: ignore[assignment]

    @property
    def is_exact(self) -> bool:
        """Whether the bounds are equal, so that the value is known."""
        return self.lower is not None and self.lower == self.upper

    @property
    def width(self) -> float:
        """The distance between the bounds; infinite if one of them is unknown."""
        return math.inf if self.lower is None or self.upper is None else self.upper - self.lower

    def __float__(self) -> float:
        return float(self._exact("float"))

    def __int__(self) -> int:
        exact = self._exact("int")
        if exact != int(exact):
            raise Undecided(f"{self} is no integer; use float(x)")
        return int(exact)

    def __bool__(self) -> bool:
        raise TypeError(f"{self} has no truth value; compare it: x > 0")

    def __lt__(self, other: object) -> bool:
        return self._compare(
            other, "<", lambda o: _below(self.upper, o.lower), lambda o: _not_above(o.upper, self.lower)
        )

    def __le__(self, other: object) -> bool:
        return self._compare(
            other, "<=", lambda o: _not_above(self.upper, o.lower), lambda o: _below(o.upper, self.lower)
        )

    def __gt__(self, other: object) -> bool:
        return self._compare(
            other, ">", lambda o: _below(o.upper, self.lower), lambda o: _not_above(self.upper, o.lower)
        )

    def __ge__(self, other: object) -> bool:
        return self._compare(
            other, ">=", lambda o: _not_above(o.upper, self.lower), lambda o: _below(self.upper, o.lower)
        )

    def __eq__(self, other: object) -> bool:
        def equal(o: Interval) -> bool:
            return self.is_exact and o.is_exact and self.lower == o.lower

        return self._compare(other, "==", equal, lambda o: _below(self.upper, o.lower) or _below(o.upper, self.lower))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __contains__(self, value: Number) -> bool:
        """Returns whether a value is within the bounds."""
        return not (_below(self.upper, value) or _below(value, self.lower))

    def __str__(self) -> str:
        if self.is_exact and self.estimate == self.lower:
            return shown(self.estimate)
        return f"{shown(self.estimate)} [{shown(self.lower)}, {shown(self.upper)}]"

    def _exact(self, target: str) -> Number:
        if not self.is_exact or self.lower is None:
            raise Undecided(f"{target}({self}): the bounds differ; use .estimate, .lower or .upper")
        return self.lower

    def _compare(self, other: object, sign: str, is_true: Any, is_false: Any) -> bool:
        if not isinstance(other, Interval | int | float):
            if sign == "==":
                return False  # for example for None
            raise TypeError(f"{self} {sign} {other!r}: an interval is compared with numbers and intervals")
        interval = other if isinstance(other, Interval) else Interval(other, other, other, 1.0)
        if is_true(interval):
            return True
        if is_false(interval):
            return False
        raise Undecided(f"{self} {sign} {other}: the bounds do not decide it; compare .lower, .upper or .estimate")


def _below(a: Number | None, b: Number | None) -> bool:
    return a is not None and b is not None and a < b


def _not_above(a: Number | None, b: Number | None) -> bool:
    return a is not None and b is not None and a <= b


def shown(number: Number | None) -> str:
    """Returns a number as text with six significant digits, integers in full; ``?`` if unknown."""
    if number is None:
        return "?"
    return (
        str(int(number)) if math.isfinite(number) and number == int(number) and abs(number) < 1e15 else f"{number:.6g}"
    )

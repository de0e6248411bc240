"""What a window comes to, as far as can be said before all of it has come. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

WORTH_SAYING = 0.25
"""The part of its interval by which an answer must change to be given again."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a window comes to, as far as can be said now.

    Attributes:
        lower, upper: hold the truth with the confidence asked for.
        sampling, straggler, missing: half-widths; `missing` is of the edges that cannot be heard.
        met: the interval keeps the contract; if not, `reason` says why the answer is given all the same.
        arrived, expected, sampled: records.
        silent: edges that cannot be heard.
        waited_slots: since the window's end.
    """

    estimate: float
    lower: float
    upper: float
    sampling: float
    straggler: float
    missing: float
    met: bool
    reason: str
    arrived: float
    expected: float
    sampled: float
    silent: tuple[str, ...]
    waited_slots: int

    @property
    def half_width(self) -> float:
        return math.sqrt(self.sampling**2 + self.straggler**2 + self.missing**2)

    @property
    def straggler_share(self) -> float:
        return 1 - self.arrived / self.expected if self.expected > 0 else 0.0

    def differs(self, other: Prediction) -> bool:
        """Whether it is worth a revision of `other`."""
        change = abs(self.estimate - other.estimate)
        return self.met != other.met or not change <= WORTH_SAYING * max(other.half_width, 0.0)

    @classmethod
    def read(cls, values: Sequence[Any]) -> Prediction:
        """From `dataclasses.astuple`, by way of JSON."""
        given = dict(zip((f.name for f in fields(cls)), values, strict=True))
        return cls(**{**given, "silent": tuple(given["silent"])})

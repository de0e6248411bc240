"""`ByteBudget`: the bytes that a query may take on the links of its edges in an hour or a day (`budget.bytes`).

What counts are the query's frames: each once, as a message of its own, with the headers of gRPC, HTTP/2, TCP and IP.
Sessions compress frames further and join them. Heartbeats belong to the session of all queries.

The bytes become available with time: `AHEAD_SHARE` of them when the period begins, and the others evenly until it ends.
So an edge whose count of bytes is lost can assume that all bytes until now were used, and it still keeps the budget.
The closes of each slice have their bytes, too, whatever was sent before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgewater.base.errors import InvalidQuery
from edgewater.base.quantities import require_keys, size_bytes
from edgewater.wire import FRAME_OVERHEAD_BYTES, link_bytes

PERIODS_MS = {"hour": 3_600_000, "day": 86_400_000}
AHEAD_SHARE = 1 / 4  # limit: the bytes that are lost if an edge begins anew
ACCEPTED = "an amount per hour or day, such as 50MB per day, or {amount: 50MB, per: day, over: all}"
COUNTED_BYTES = (
    "the frames of this query count, each once. Heartbeats of an edge, which all its queries share, and frames that "
    "are sent again after a broken connection do not count; `daily` in the configuration of an edge counts all of "
    "them. An edge that begins within a period has the bytes of the rest of it"
)
_BODY_BYTES, _CLOSE_BYTES, _WITHHELD_BYTES = 40, 40, 100  # limit: bytes of a frame
"""Upper bounds of a body without content, of a close, and of what it states of a measure."""


@dataclass(frozen=True, slots=True)
class ByteBudget:
    """The bytes of a query in each hour or day (UTC).

    Attributes:
        amount_bytes: of each edge, or of all edges together.
        per: a key of `PERIODS_MS`.
        over_all: whether the amount is divided equally among the expected edges.
    """

    amount_bytes: int
    per: str
    over_all: bool = False

    @classmethod
    def parse(cls, value: object) -> ByteBudget:
        """Reads ``50MB per day`` or a mapping. Raises InvalidQuery."""
        at = "budget.bytes"
        if isinstance(value, str):
            amount, _, per = value.partition(" per ")
            value = {"amount": amount.strip(), "per": per.strip()}
        if not isinstance(value, Mapping):
            raise InvalidQuery(at, value, ACCEPTED)
        b = require_keys(value, at, {"amount": True, "per": True, "over": False}, InvalidQuery)
        over = b.get("over", "edge")
        if str(b["per"]) not in PERIODS_MS:
            raise InvalidQuery(f"{at}.per", b["per"], "hour or day", f"budget.bytes is {ACCEPTED}")
        if over not in ("edge", "all"):
            raise InvalidQuery(f"{at}.over", over, "edge, or all for all edges together")
        return cls(size_bytes(b["amount"], f"{at}.amount", InvalidQuery), str(b["per"]), over == "all")

    def to_value(self) -> str | dict[str, str]:
        """Returns the budget as a user writes it."""
        amount = f"{self.amount_bytes}B"
        text: dict[str, str] = {"amount": amount, "per": self.per, "over": "all"}
        return text if self.over_all else f"{amount} per {self.per}"

    @property
    def period_ms(self) -> int:
        return PERIODS_MS[self.per]

    def of_edge(self, edges: Sequence[str] | None) -> int:
        """Returns the bytes of one of the expected edges."""
        return self.amount_bytes // len(edges) if self.over_all and edges else self.amount_bytes

    def require_enough(self, name: str, measures: Sequence[str], slice_ms: int, edges: Sequence[str] | None) -> None:
        """Raises InvalidQuery if the closes of all slices take more, or the edges of the division are unknown."""
        if self.over_all and not edges:
            accepted = "a query that lists its `edges`, or an amount per edge"
            raise InvalidQuery("budget.bytes.over", "all", accepted, "the amount is divided among the expected edges")
        # A close that comes first in a period needs its bytes at once.
        closes = max(self.period_ms / slice_ms / (1.0 - AHEAD_SHARE), 1.0 / AHEAD_SHARE)
        least = math.ceil(closes * close_bytes(name, measures)) * (len(edges or ()) if self.over_all else 1)
        if self.amount_bytes < least:
            accepted = f"at least {least}B per {self.per}"
            reason = "edges close each window, or each step of a sliding window, even if they send no value of it"
            raise InvalidQuery("budget.bytes", self.to_value(), accepted, reason)


def close_bytes(name: str, measures: Sequence[str]) -> int:
    """Returns at most how many bytes a link carries for a frame that closes one slice and has no values."""
    return frame_bytes(name, stated_bytes(measures))


def frame_bytes(name: str, content_bytes: int) -> int:
    """Returns at most how many bytes a link carries for a frame with so many bytes of partials and statements."""
    return link_bytes(FRAME_OVERHEAD_BYTES + len(name) + _BODY_BYTES + content_bytes)


def stated_bytes(measures: Sequence[str]) -> int:
    """Returns at most how many bytes a frame has for what it states of one slice or of its dropped records."""
    return _CLOSE_BYTES + sum(_WITHHELD_BYTES + len(m.encode()) for m in measures)

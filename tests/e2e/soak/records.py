"""Records that the soak writes, and what became of each."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

KEYS = ("a", "b", "c", "d")
COLUMNS = {"k": "string", "src": "string", "n": "int64", "v": "int64", "p": "int64", "z": "int64", "x": "float64"}
"""`n` is the record's own number, `p` positive, `z` an argument of ln; `v` and `x` have both signs."""
SCHEMA = pa.schema(
    [("at", pa.int64()), *((n, pa.string() if t == "string" else getattr(pa, t)()) for n, t in COLUMNS.items())]
)


@dataclass(frozen=True, slots=True)
class Record:
    """One input record; `at` is its event time in ms; `p` is None once its source has renamed the column."""

    at: int
    k: str
    src: str
    n: int
    v: int
    p: int | None
    z: int
    x: float

    def to_json(self) -> str:
        values = {name: getattr(self, name) for name in ("at", *COLUMNS)}
        named = {name if value is not None else f"{name}_renamed": value for name, value in values.items()}
        return json.dumps(named, separators=(",", ":"))

    @property
    def log_z(self) -> float:
        """`ln(z)` in float64: −∞ of zero, NaN of a negative number."""
        return math.log(self.z) if self.z > 0 else -math.inf if self.z == 0 else math.nan


def to_arrow(records: Sequence[Record]) -> bytes:
    """The records as an Arrow IPC stream."""
    columns = {name: [getattr(r, name) for r in records] for name in ("at", *COLUMNS)}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_table(pa.table(columns, SCHEMA))
    data: bytes = sink.getvalue().to_pybytes()
    return data


@dataclass(frozen=True, slots=True)
class Handed:
    """A record that was handed to an edge.

    Attributes:
        at_ms: wall time at which it was written to its file or pipe, or its push was acknowledged.
        certain: False: a push without a reply, which the edge may have accepted or not.
        watermark_ms: event time that the watermark of its source may have reached by then.
    """

    record: Record
    edge: str
    at_ms: int
    certain: bool
    watermark_ms: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """A record that its source rejects; fields as in `Handed`.

    Attributes:
        event_ms: its event time; None: it has none that can be read.
    """

    src: str
    edge: str
    at_ms: int
    certain: bool
    event_ms: int | None = None


@dataclass(slots=True)
class InputLog:
    """All records of an episode. Thread-safe.

    Attributes:
        rejected: the records that sources reject.
        disorder_ms: how far behind the newest record of its source a record may come, as configured at the edges.
        idle_ms: the watermark of a source that has been silent for half of this may follow the clock.
        repeated: batches that an edge had counted when they were pushed again.
    """

    disorder_ms: int
    idle_ms: int
    handed: list[Handed] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    refused: int = 0
    repeated: int = 0
    _newest: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, edge: str, records: Sequence[Record], at_ms: int, *, certain: bool = True, capped: bool) -> None:
        """Adds records that were handed over together.

        Args:
            capped: records ahead of the clock moved the watermark no further than the clock. False: unknown, because
                the edge may read them later.
        """
        with self._lock:
            for record in records:
                newest = self._newest.get(record.src, 0)
                watermark = max(newest - self.disorder_ms, at_ms - self.idle_ms // 2)
                self.handed.append(Handed(record, edge, at_ms, certain, watermark))
            for record in records:
                time = min(record.at, at_ms) if capped else record.at
                self._newest[record.src] = max(self._newest.get(record.src, 0), time)


@dataclass(frozen=True, slots=True)
class Profile:
    """How one source's records deviate from records that come in order with the clock; each a fraction of records."""

    late: float = 0.0
    ahead: float = 0.0
    not_a_number: float = 0.0
    big: float = 0.0
    overflow: float = 0.0


class RecordSource:
    """Draws the records of one source.

    Args:
        lateness_ms: late records come up to twice this much (plus a window) late.
    """

    def __init__(self, src: str, profile: Profile, lateness_ms: int, number: int, rng: np.random.Generator) -> None:
        self.src, self._profile, self._rng = src, profile, rng
        self._late_ms = 2 * lateness_ms + 3000
        self._number = number

    def draw(self, count: int, now_ms: int) -> list[Record]:
        return [self._draw(now_ms) for _ in range(count)]

    def _draw(self, now_ms: int) -> Record:
        rng, profile = self._rng, self._profile
        chance = rng.random(4)
        at = now_ms
        if chance[0] < profile.late:
            at -= int(rng.integers(200, self._late_ms))
        elif chance[1] < profile.ahead:
            at += int(rng.integers(500, 5000))
        v = int(rng.integers(-100, 1000))
        if chance[2] < profile.big:
            v = (1 << 53) + int(rng.integers(0, 8))
        elif chance[2] < profile.big + profile.overflow:
            v = (1 << 62) + int(rng.integers(0, 1 << 32))
        z = int(rng.integers(1, 50))
        if chance[3] < profile.not_a_number:
            z = int(rng.integers(-1, 1))
        self._number += 1
        key = KEYS[min(int(rng.geometric(0.45)) - 1, len(KEYS) - 1)]
        return Record(at, key, self.src, self._number, v, int(rng.integers(50, 150)), z, float(rng.normal(0, 100)))

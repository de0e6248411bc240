"""Reports the state of each source of a running agent, for `/metrics`, ``GET /v1/sources`` and `edgewater edge top`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from edge.records import Chunk, Lag, Position, ReportsLag, Source
from edge.utilization import BusyMeter
from edgewater.base.streams import Delivery, weaker_than_exactly_once

log = logging.getLogger(__name__)

MAX_ENTRIES = 200
"""The largest number of entries that are shown separately. A kind of a package may return any number of sources."""
OTHERS = "others"
MAX_POSITIONS = 32
"""The largest number of sources of an entry whose positions are shown."""
MAX_TEXT = 200  # limit: size of a status
READY, FAILING, ENDED = "ready", "failing", "ended"


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """The status of one entry of ``sources`` in the configuration.

    Attributes:
        source: the name of the source; for a topic with many partitions, the name without the partition.
        parts: the number of sources of the entry, such as partitions.
        state: ready, failing, or ended.
        failing: the number of sources of the entry that cannot be read.
        reason: why the first failing source cannot be read; None if no source fails.
        records: number of records since the agent started.
        rejected: number of rejected records since the agent started, by reason.
        guessed: number of records that were counted, or left out, on a guess since the agent started, by reason.
        behind_s: the longest time, in seconds, for which one of the sources has been read without a wait for input.
        positions: by source, the position at which reading continues after a restart.
    """

    stream: str
    source: str
    delivery: tuple[Delivery, ...]
    parts: int
    state: str
    failing: int
    reason: str | None
    records: int
    rejected: Mapping[str, int]
    guessed: Mapping[str, int]
    lag: Lag
    behind_s: float
    positions: Mapping[str, Position]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class _Entry:
    stream: str
    name: str
    sources: list[Source] = field(default_factory=list)
    records: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    guessed: dict[str, int] = field(default_factory=dict)


class SourceStates:
    """Counts the records of each source. Not thread-safe."""

    def __init__(self, meter: BusyMeter) -> None:
        self._meter = meter
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._entry_of: dict[str, _Entry] = {}
        self._without_lag: set[str] = set()

    def add(self, source: Source, opener: Source | None = None) -> None:
        """Adds a source. Called for each source before it is read.

        Args:
            opener: the source that has opened this source. Both are shown together.
        """
        if opener is not None:
            entry = self._entry_of[opener.name]
        else:
            key = source.stream, str(getattr(source, "entry", source.name))
            if key not in self._entries and len(self._entries) >= MAX_ENTRIES:
                key = source.stream, OTHERS
            entry = self._entries.setdefault(key, _Entry(*key))
        entry.sources.append(source)
        self._entry_of[source.name] = entry

    def count(self, source: str, chunk: Chunk) -> None:
        """Counts the records of a chunk. Called with each chunk that is read or pushed."""
        entry = self._entry_of[source]
        entry.records += chunk.batch.num_rows
        for rejection in chunk.rejected:
            if rejection.reason not in entry.rejected:
                # Messages and examples may quote records, which can be confidential.
                where = "`edgewater edge check` and the log level debug show an example"
                text = "stream %s, source %s: records are rejected: %s; %s"
                log.warning(text, entry.stream, source, rejection.reason, where)
                log.debug("stream %s, source %s: %s (%s)", entry.stream, source, rejection.message, rejection.example)
            entry.rejected[rejection.reason] = entry.rejected.get(rejection.reason, 0) + rejection.count
        for guess in chunk.guessed:
            if guess.reason not in entry.guessed:
                log.warning("stream %s, source %s: %s: %s", entry.stream, source, guess.reason, guess.message)
            entry.guessed[guess.reason] = entry.guessed.get(guess.reason, 0) + guess.count

    def statuses(
        self, failures: Mapping[str, str], positions: Mapping[str, Position], is_open: Callable[[Source], bool]
    ) -> list[SourceStatus]:
        """Returns the status of each entry. Calls `lag` of the sources that have it.

        Args:
            failures: the error message of each source that cannot be read.
            positions: the position of each source.
            is_open: returns whether a source has not ended.
        """
        return [self._status(entry, failures, positions, is_open) for entry in self._entries.values()]

    def _status(
        self,
        entry: _Entry,
        failures: Mapping[str, str],
        positions: Mapping[str, Position],
        is_open: Callable[[Source], bool],
    ) -> SourceStatus:
        reasons = [failures[source.name] for source in entry.sources if source.name in failures]
        running = [source for source in entry.sources if is_open(source)]
        return SourceStatus(
            entry.stream,
            entry.name,
            weaker_than_exactly_once(s.delivery for s in entry.sources) or (Delivery.EXACTLY_ONCE,),
            len(entry.sources),
            FAILING if reasons else READY if running else ENDED,
            len(reasons),
            reasons[0] if reasons else None,
            entry.records,
            dict(entry.rejected),
            dict(entry.guessed),
            Lag.of_all([self._lag(source) for source in running]),
            max((self._meter.busy_for_s(source.name) for source in running), default=0.0),
            {
                source.name: _shown(positions[source.name])
                for source in entry.sources[:MAX_POSITIONS]
                if source.name in positions
            },
        )

    def _lag(self, source: Source) -> Lag:
        if not isinstance(source, ReportsLag):
            return Lag()
        try:
            return source.lag()
        except Exception:  # a failing source must not affect other sources
            if source.name not in self._without_lag:
                self._without_lag.add(source.name)
                log.exception("source %s cannot tell its lag", source.name)
            return Lag()


def _shown(position: Position) -> Position:
    """Returns the members of a position that are integers or short texts, for people."""
    return {
        name: value
        for name, value in position.items()
        if isinstance(value, int) or (isinstance(value, str) and len(value) <= MAX_TEXT)
    }

"""The recently counted pushed batches, so that a batch counts once even if its client sends it again."""

from __future__ import annotations

import struct

from edge.records import PushId
from edgewater.base.errors import InvalidRequest

REMEMBERED_MS = 600_000  # limit: memory of counted pushes
"""How long a pushed batch is remembered after its arrival, in ms."""
MAX_REMEMBERED = 32_768
"""The largest number of remembered batches (8 MB). With more than 54 batches per second, batches are remembered for a
shorter time.
"""
_ENTRY = struct.Struct("<16s16sqI")


class CountedPushes:
    """The batches that were counted in the last `REMEMBERED_MS`, at most `MAX_REMEMBERED`.

    The journal has the identity of a batch in the batch's own record, so both are durable together. The state is a
    function of the journal, because times are the arrival times of the events.

    Attributes:
        repeated: number of batches that were pushed again since the start of the process.
    """

    def __init__(self) -> None:
        self.repeated = 0
        self._counted: dict[bytes, tuple[bytes, int, int]] = {}  # key -> digest of the body, arrival (ms), records

    def __len__(self) -> int:
        return len(self._counted)

    def add(self, push: PushId, arrival_ms: int, records: int) -> None:
        """Remembers a batch that is counted now, and removes batches that are too old or too many."""
        self._counted.pop(push.key, None)
        self._counted[push.key] = push.body, arrival_ms, records
        while len(self._counted) > MAX_REMEMBERED or self._oldest_ms < arrival_ms - REMEMBERED_MS:
            del self._counted[next(iter(self._counted))]

    @property
    def _oldest_ms(self) -> int:
        return next(iter(self._counted.values()))[1]

    def records_of(self, push: PushId, now_ms: int) -> int | None:
        """Returns the number of records of a counted batch; None if the batch is not remembered.

        Raises:
            InvalidRequest: the client has used its key for another body.
        """
        body, arrival_ms, records = self._counted.get(push.key, (b"", 0, 0))
        if not body or arrival_ms < now_ms - REMEMBERED_MS:
            return None
        if body != push.body:
            reason = "this key was used for another body within ten minutes"
            raise InvalidRequest("Idempotency-Key", push.shown, "a new key for each batch", reason)
        return records

    def to_bytes(self) -> bytes:
        return b"".join(_ENTRY.pack(key, *counted) for key, counted in self._counted.items())

    @classmethod
    def from_bytes(cls, data: bytes) -> CountedPushes:
        """Restores the result of `to_bytes`."""
        result = cls()
        result._counted = {
            key: (body, arrival_ms, records) for key, body, arrival_ms, records in _ENTRY.iter_unpack(data)
        }
        return result

"""Stores merged slices, the ledger's state and the answers, in SQLite or PostgreSQL.

`center.job` writes; `center.serving` and `center.api` read. `center.ledger` decides which answers are given, and when.
"""

from center.results.answers import (
    UNREADABLE,
    AnswerChanges,
    AnswerReader,
    AnswerRecord,
    NewestAnswers,
    as_far_as_readable,
    read_cursor,
)
from center.results.lease import Lease, LeaseLost
from center.results.retention import trimming
from center.results.store import ResultStore, restored_at_ms
from center.results.writes import COSTLY_MS, MAX_ANSWER_BYTES, AnswersCostly

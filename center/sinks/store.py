"""`SinkStore` stores the sinks that the API has defined, and the state of all sinks, in the result store's database."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Engine,
    MetaData,
    Row,
    case,
    delete,
    func,
    insert,
    select,
    update,
)

from center.results import LeaseLost, restored_at_ms
from center.results.schema import answers, counters
from center.sinks.base import SinkContext, SinkMemory
from center.storage.database import (
    FreeText,
    Identifier,
    drop_column,
    key,
    read_transaction,
    required,
    schema_transaction,
    table_in,
    upsert,
    write_transaction,
)
from edgewater.base.errors import NotFound
from edgewater.model.json_types import Document
from edgewater.model.registered_query import query_from_key, query_key
from edgewater.wire import QueryRef

metadata = MetaData()
table = table_in(metadata)
sinks = table(
    "sinks",
    *key(Identifier(63), "name"),
    Column("definition", FreeText),
    *required(Boolean, "paused", default=False),
    Column("replay_after", BigInteger),
    *required(BigInteger, "answer_id", default=-1),
    *required(BigInteger, "answers", "rows", "problem_since_ms", "trimmed", "gap_from", "gap_through", default=0),
    *required(BigInteger, "epoch", "until_ms", default=0),
    *required(Identifier(255), "owner", default=""),
    *required(FreeText, "problem", default=""),
    *required(BigInteger, "refused", default=0, server_default="0"),
    *required(FreeText, "refusal", default="", server_default=""),
    *required(BigInteger, "is_earlier", default=0, server_default="-1"),
)
"""A table with a row per sink. ``definition``: JSON of a sink that the API has defined; null if the sink is in
``center.yaml``; `ENDING` if the sink is deleted and its alerts have not ended yet. ``answer_id``: see `SinkStatus`; -1
if the sink was never open. ``replay_after``: the position that an operator has requested. ``trimmed``: answers up to
this id were deleted when the row was last written. ``is_earlier``: 1 if release 0.3 has run the sink, otherwise 0; -1
until this release has read the row."""

waiting = table(
    "sink_queries",
    *key(Identifier(63), "name"),
    *key(Identifier(96), "query"),
    *required(BigInteger, "answer_id", "problem_since_ms"),
    *required(FreeText, "problem"),
)
"""The queries for which a sink lacks answers up to ``sinks.answer_id``, or which it cannot write. ``answer_id``: the
last answer that it has."""

memories = table(
    "sink_memories",
    *key(Identifier(63), "name"),
    *required(BigInteger, "answer_id"),
    *required(FreeText, "state"),
    *required(FreeText, "positions", "target", server_default=""),
)
"""The states of sinks whose targets do not store positions (`SinkMemory`). ``positions`` is JSON with the last answer
of each query. It is empty in a row of release 0.3, where ``answer_id`` is the position of all queries."""

MAX_PROBLEM = 2_000
"""Characters of a stored problem: a limit of what readers of the status receive."""
CENTER = "center"
"""The counter with the number of the center in targets of sinks."""
ENDING = "{}"
"""The definition of a deleted sink of the kind `alerts` until its alerts have ended. Readers do not see such a sink."""


@dataclass(frozen=True, slots=True)
class WaitingQuery:
    """A query for which a sink lacks answers.

    Attributes:
        answer_id: id of the last answer that the sink has.
        problem: why the last attempt failed; empty if it did not fail.
        problem_since_ms: wall time of the first failure since the last success; 0 if the last attempt did not fail.
    """

    answer_id: int
    problem: str = ""
    problem_since_ms: int = 0


@dataclass(frozen=True, slots=True)
class SinkStatus:
    """The state of a sink.

    Attributes:
        definition: the definition, if the API has defined the sink; None if the sink is in ``center.yaml``.
        answer_id: the sink has all answers up to this id, except answers to the queries `waiting`; -1 if the sink was
            never open.
        waiting: the queries for which the sink lacks answers up to `answer_id`.
        replay_after: id of an answer. The sink will begin again after this answer; None if no replay is requested.
        answers, rows: numbers of answers and rows that the sink has written since it was defined.
        problem: why the last attempt failed; empty if it did not fail.
        problem_since_ms: wall time of the first failure since the last success; 0 if the last attempt did not fail.
        gap: first and last id of answers that were deleted before the sink had them; None if there are no such answers.
        owner: name of the process that runs the sink; empty if no process runs it.
        epoch: increases whenever a process takes the sink.
        until_ms: end of the owner's lease, on the owner's clock.
        refused: number of parts of answers, such as samples or messages, that the target will never accept.
        refusal: query, window and reason of the last of them.
    """

    name: str
    definition: Document | None
    paused: bool
    answer_id: int
    waiting: Mapping[QueryRef, WaitingQuery]
    replay_after: int | None
    answers: int
    rows: int
    problem: str
    problem_since_ms: int
    gap: tuple[int, int] | None
    owner: str
    epoch: int
    until_ms: int
    refused: int
    refusal: str

    def is_run(self, now_ms: int) -> bool:
        """Returns whether a process runs the sink."""
        return bool(self.owner) and self.until_ms > now_ms

    def trouble(self, now_ms: int) -> str:
        """Returns why no answers are written. Empty if answers are written, or if an operator has paused the sink."""
        if self.paused:
            return ""
        nobody = "" if self.is_run(now_ms) else "no process `edgewater center sink` runs it"
        return self.problem or nobody


class SinkStore:
    """Stores the sinks. Each method is one transaction, blocks, and is thread-safe.

    Args:
        engine: the engine of the result store.

    Raises:
        StorageError: raised by every method if the database cannot be used.
    """

    def __init__(self, engine: Engine) -> None:
        self._database = engine
        self._is_prepared = False

    @property
    def _engine(self) -> Engine:
        """The database, with the sinks' tables. The first use creates the tables, because an API may start before its
        database.
        """
        if not self._is_prepared:
            with schema_transaction(self._database, metadata) as connection:
                for table in (sinks, memories):
                    drop_column(connection, table, "late")  # of release 0.3
                was_open = case((sinks.c.answer_id > 0, 1), else_=0)
                connection.execute(update(sinks).where(sinks.c.is_earlier < 0).values(is_earlier=was_open))
            self._is_prepared = True
        return self._database

    def statuses(self) -> list[SinkStatus]:
        """Returns the states of all sinks that the API has defined or that a process has run, sorted by name."""
        with read_transaction(self._engine) as connection:
            found = _waiting(connection)
            rows = connection.execute(select(sinks).order_by(sinks.c.name))
            return [_status(row, found.get(row.name, {})) for row in rows if row.definition != ENDING]

    def ending(self) -> list[str]:
        """Returns the names of the deleted sinks whose alerts have not ended yet."""
        with read_transaction(self._engine) as connection:
            return list(connection.execute(select(sinks.c.name).where(sinks.c.definition == ENDING)).scalars())

    def status(self, name: str) -> SinkStatus:
        """Returns the state of a sink.

        Raises:
            NotFound: there is no sink of this name.
        """
        with read_transaction(self._engine) as connection:
            row = _row(connection, name)
            if row.definition == ENDING:
                raise _unknown(name)
            return _status(row, _waiting(connection, name).get(name, {}))

    def lowest_answer(self) -> int | None:
        """Returns an id up to which all sinks have all answers, or None if there is no sink. A query that has no
        further answer does not make it lower.
        """
        own = case((sinks.c.replay_after.is_(None), sinks.c.answer_id), else_=sinks.c.replay_after)
        further = (answers.c.query == waiting.c.query) & (answers.c.answer_id > waiting.c.answer_id)
        of_query = select(func.min(answers.c.answer_id)).where(further).scalar_subquery()
        with read_transaction(self._engine) as connection:
            is_read = sinks.c.definition.is_(None) | (sinks.c.definition != ENDING)
            found = list(connection.execute(select(own).where(is_read)).scalars())
            waits = waiting.c.name.in_(select(sinks.c.name).where(is_read))
            next_ids = connection.execute(select(of_query).select_from(waiting).where(waits)).scalars()
            found += [value - 1 for value in next_ids if value is not None]
        return max(0, min(found)) if found else None

    # Methods for operators

    def define(self, name: str, document: Document) -> bool:
        """Stores a definition, and returns whether the sink is new. If an existing definition changes, the sink keeps
        its position.
        """
        with write_transaction(self._engine) as connection:
            before = connection.execute(select(sinks.c.definition).where(sinks.c.name == name)).one_or_none()
            upsert(connection, sinks, [{"name": name, "definition": json.dumps(document)}])
            return before is None or before.definition == ENDING

    def remove(self, name: str, *, ends: bool = False) -> None:
        """Deletes a sink and its state, but not the answers that it has written.

        Args:
            ends: whether a process first ends the alerts of the sink, and then calls `forget`.

        Raises:
            NotFound: there is no sink of this name.
        """
        if ends:
            self._change(name, definition=ENDING, paused=False, replay_after=None)
            return
        with write_transaction(self._engine) as connection:
            if connection.execute(delete(sinks).where(sinks.c.name == name)).rowcount == 0:
                raise _unknown(name)
            _delete_state(connection, name)

    def forget(self, name: str) -> None:
        """Deletes a sink whose alerts have ended, and its state, unless it was defined again."""
        with write_transaction(self._engine) as connection:
            this = (sinks.c.name == name) & (sinks.c.definition == ENDING)
            if connection.execute(delete(sinks).where(this)).rowcount:
                _delete_state(connection, name)

    def pause(self, name: str, paused: bool) -> None:
        """Pauses a sink, or ends the pause.

        Raises:
            NotFound: there is no sink of this name.
        """
        self._change(name, paused=paused)

    def replay(self, name: str, after_answer_id: int) -> None:
        """Requests that a sink begins again after an answer.

        Raises:
            NotFound: there is no sink of this name.
        """
        self._change(name, replay_after=after_answer_id)

    # Methods for the process that runs a sink

    def take(self, name: str, owner: str, now_ms: int, lease_ms: int, *, adds: bool = True) -> int | None:
        """Takes the lease of a sink if it is free or has ended, and returns the sink's new epoch.

        Returns None if another process runs the sink, or if the sink does not exist and `adds` is false.

        Args:
            adds: whether a sink that does not exist is added.
        """
        with write_transaction(self._engine) as connection:
            row = connection.execute(select(sinks).where(sinks.c.name == name).with_for_update()).one_or_none()
            if row is None:
                if not adds:
                    return None
                connection.execute(insert(sinks).values(name=name, definition=None))
                row = _row(connection, name)
            if row.owner not in ("", owner) and row.until_ms > now_ms:
                return None
            # The target may have an epoch from after the backup that was restored, or of a copy of this center.
            epoch = max(int(row.epoch) + 1, restored_at_ms(connection) + 1, now_ms)
            values = {"owner": owner, "epoch": epoch, "until_ms": now_ms + lease_ms}
            if adds and row.definition == ENDING:
                values["definition"] = None
            connection.execute(update(sinks).where(sinks.c.name == name).values(**values))
            return epoch

    def state_problem(self, name: str, problem: str, now_ms: int) -> None:
        """Stores why a process cannot build a sink. If another process runs the sink, nothing is stored."""
        c = sinks.c
        changed = case((c.problem == problem, c.problem_since_ms), else_=now_ms)
        with write_transaction(self._engine) as connection:
            idle = (c.name == name) & ((c.owner == "") | (c.until_ms < now_ms))
            values = {"problem": problem[:MAX_PROBLEM], "problem_since_ms": changed}
            connection.execute(update(sinks).where(idle).values(**values))

    def report(
        self,
        name: str,
        epoch: int,
        until_ms: int,
        *,
        answer_id: int | None = None,
        lowest: int = -1,
        waits: Mapping[QueryRef, WaitingQuery | None] | None = None,
        replayed: int | None = None,
        written: Mapping[str, int] = MappingProxyType({}),
        refusal: str = "",
        trimmed: int | None = None,
        problem: str | None = None,
        now_ms: int = 0,
    ) -> SinkStatus:
        """Renews the lease, stores the sink's progress since the last report, and returns the sink's state.

        Args:
            answer_id: as in `SinkStatus`; None if it has not changed.
            lowest: id of the last answer up to which the sink has all answers of all queries.
            waits: changes of `SinkStatus.waiting`; None for a query for which no answer is lacking any more.
            replayed: the `replay_after` after which the sink has begun again; None if it has not begun again.
            written: numbers since the last report, by the names ``answers``, ``rows`` and ``refused`` of `SinkStatus`.
            refusal: as in `SinkStatus`; empty if it has not changed.
            trimmed: answers up to this id are deleted. If the sink lacks some of them, the state has a gap.
            problem: why the last attempt failed; empty if it did not fail. If None, the stored problem stays.

        Raises:
            LeaseLost: another process has taken the sink, or the sink is no longer defined.
        """
        with write_transaction(self._engine) as connection:
            row = connection.execute(select(sinks).where(sinks.c.name == name).with_for_update()).one_or_none()
            if row is None or row.epoch != epoch or epoch <= restored_at_ms(connection):
                raise LeaseLost(f"sink {name} is run by another process, or is no longer defined")
            counts = {each: getattr(row, each) + number for each, number in written.items()}
            values: dict[str, int | str | None] = {"until_ms": until_ms, **counts}
            if answer_id is not None:
                values["answer_id"] = answer_id
            if refusal:
                values["refusal"] = refusal[:MAX_PROBLEM]
            if replayed is not None and replayed == row.replay_after:
                values["replay_after"] = None
            if trimmed is not None and trimmed > row.trimmed:
                values["trimmed"] = trimmed
                # A new sink begins with the stored answers, so answers that were deleted before are not a gap.
                if row.answer_id >= 0:
                    values |= _gap(row, row.answer_id if lowest < 0 else lowest, trimmed)
            if problem is not None:
                values |= {
                    "problem": problem[:MAX_PROBLEM],
                    "problem_since_ms": 0 if not problem else row.problem_since_ms or now_ms,
                }
            connection.execute(update(sinks).where(sinks.c.name == name).values(**values))
            _change_waiting(connection, name, waits or {})
            return _status(_row(connection, name), _waiting(connection, name).get(name, {}))

    def context(self, name: str, epoch: int, now_ms: Callable[[], int], target: str = "") -> SinkContext:
        """Returns the context of a sink, for the process that has taken the sink with an epoch.

        Args:
            target: names the target of a sink whose memory has the positions.
        """
        with write_transaction(self._engine) as connection:
            value = select(counters.c.value)
            # Another process may do the same, so the counter of answers is a lock.
            connection.execute(value.where(counters.c.name == "answer").with_for_update())
            center = connection.execute(value.where(counters.c.name == CENTER)).scalar()
            if center is None:
                center = secrets.randbits(62) | 1
                connection.execute(insert(counters).values(name=CENTER, value=center))
            earlier = connection.execute(select(sinks.c.name).where(sinks.c.is_earlier == 1)).scalars().all()

        def running() -> list[str]:
            return [each.name for each in self.statuses() if each.name != name and each.is_run(now_ms())]

        memory = _Memory(self._engine, name, epoch, target)
        return SinkContext(name, epoch, memory, now_ms, center=center, earlier=earlier, running=running)

    def memories(self) -> dict[str, str]:
        """Returns the states that sinks have saved, by name of the sink."""
        with read_transaction(self._engine) as connection:
            states: dict[str, str] = dict(connection.execute(select(memories.c.name, memories.c.state)).all())
        return states

    def release(self, name: str, epoch: int) -> None:
        """Frees the lease of a sink if `epoch` is still the sink's epoch."""
        with write_transaction(self._engine) as connection:
            mine = (sinks.c.name == name) & (sinks.c.epoch == epoch)
            connection.execute(update(sinks).where(mine).values(owner=""))

    def _change(self, name: str, **values: Any) -> None:
        with write_transaction(self._engine) as connection:
            if connection.execute(update(sinks).where(sinks.c.name == name).values(**values)).rowcount == 0:
                raise _unknown(name)


class _Memory(SinkMemory):
    def __init__(self, engine: Engine, name: str, epoch: int, target: str) -> None:
        super().__init__()
        self._engine, self._name, self._epoch = engine, name, epoch
        self._target = hashlib.sha256(target.encode()).hexdigest() if target else ""  # a URL may have a secret
        self._stored: dict[str, int] = {}

    def load(self, queries: Iterable[QueryRef]) -> tuple[dict[QueryRef, int], str] | None:
        c = memories.c
        of_target = (c.target == self._target) & (c.target != "")  # also the memory of an earlier name of the sink
        with read_transaction(self._engine) as connection:
            found = connection.execute(select(memories).where((c.name == self._name) | of_target)).all()
        own = [row for row in found if row.name == self._name and row.target in ("", self._target)]
        keys, rows = {query_key(ref): ref for ref in queries}, own or [row for row in found if row.name != self._name]
        if not rows:
            return None
        for row in rows:
            stored = json.loads(row.positions) if row.positions else dict.fromkeys(keys, row.answer_id)
            self._stored |= {key: max(value, self._stored.get(key, 0)) for key, value in stored.items()}
        return {ref: self._stored[key] for key, ref in keys.items() if key in self._stored}, rows[0].state

    def save(self, positions: Mapping[QueryRef, int], state: str) -> None:
        self._stored |= {query_key(ref): answer_id for ref, answer_id in positions.items()}
        with write_transaction(self._engine) as connection:
            _require_epoch(connection, self._name, self._epoch)
            row = {"name": self._name, "answer_id": 0, "state": state, "target": self._target}
            upsert(connection, memories, [{**row, "positions": json.dumps(self._stored)}])


def _delete_state(connection: Connection, name: str) -> None:
    for table in (memories, waiting):
        connection.execute(delete(table).where(table.c.name == name))


def _require_epoch(connection: Connection, name: str, epoch: int) -> None:
    owned = select(sinks.c.epoch).where(sinks.c.name == name).with_for_update()
    if connection.execute(owned).scalar_one_or_none() != epoch:
        raise LeaseLost(f"sink {name} is run by another process, or is no longer defined")


def _gap(row: Row[Any], has: int, trimmed: int) -> dict[str, int]:
    first = max(has, row.trimmed) + 1
    if first > trimmed:
        return {}
    return {"gap_from": row.gap_from or first, "gap_through": trimmed}


def _row(connection: Connection, name: str) -> Row[Any]:
    row = connection.execute(select(sinks).where(sinks.c.name == name)).one_or_none()
    if row is None:
        raise _unknown(name)
    return row


def _waiting(connection: Connection, name: str | None = None) -> dict[str, dict[QueryRef, WaitingQuery]]:
    """Returns the waiting queries by sink, of one sink or of all."""
    rows = select(waiting) if name is None else select(waiting).where(waiting.c.name == name)
    found: dict[str, dict[QueryRef, WaitingQuery]] = {}
    for row in connection.execute(rows.order_by(waiting.c.query)):
        query = WaitingQuery(row.answer_id, row.problem, row.problem_since_ms)
        found.setdefault(row.name, {})[query_from_key(row.query)] = query
    return found


def _change_waiting(connection: Connection, name: str, changes: Mapping[QueryRef, WaitingQuery | None]) -> None:
    gone = [query_key(ref) for ref, query in changes.items() if query is None]
    if gone:
        connection.execute(delete(waiting).where((waiting.c.name == name) & waiting.c.query.in_(gone)))
    rows = [
        {"name": name, "query": query_key(ref), "answer_id": query.answer_id, "problem": query.problem[:MAX_PROBLEM],
         "problem_since_ms": query.problem_since_ms}
        for ref, query in changes.items()
        if query is not None
    ]  # fmt: skip
    upsert(connection, waiting, rows)


def _unknown(name: str) -> NotFound:
    return NotFound(f"there is no sink {name}; `edgewater sinks ls` lists all")


_COPIED = {f.name for f in fields(SinkStatus)} & set(sinks.c.keys())


def _status(row: Row[Any], queries: Mapping[QueryRef, WaitingQuery]) -> SinkStatus:
    status = {name: row._mapping[name] for name in _COPIED}
    status["definition"] = None if row.definition is None else json.loads(row.definition)
    return SinkStatus(**status, waiting=queries, gap=(row.gap_from, row.gap_through) if row.gap_through else None)

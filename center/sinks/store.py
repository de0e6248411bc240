"""`SinkStore` stores the sinks that the API has defined, and the state of all sinks, in the result store's database."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Engine,
    MetaData,
    Row,
    Table,
    case,
    delete,
    func,
    insert,
    select,
    update,
)

from center.results import LeaseLost, restored_at_ms
from center.sinks.base import Position, SinkMemory
from center.storage.database import (
    FreeText,
    Identifier,
    read_transaction,
    schema_transaction,
    upsert,
    write_transaction,
)
from edgewater.model.errors import NotFound
from edgewater.wire import QueryRef

metadata = MetaData()
sinks = Table(
    "sinks",
    metadata,
    Column("name", Identifier(63), primary_key=True),
    Column("definition", FreeText),
    Column("paused", Boolean, nullable=False),
    Column("replay_after", BigInteger),
    Column("answer_id", BigInteger, nullable=False),
    Column("late", BigInteger, nullable=False),
    Column("answers", BigInteger, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Column("problem", FreeText, nullable=False),
    Column("problem_since_ms", BigInteger, nullable=False),
    Column("trimmed", BigInteger, nullable=False),
    Column("gap_from", BigInteger, nullable=False),
    Column("gap_through", BigInteger, nullable=False),
    Column("owner", Identifier(255), nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("until_ms", BigInteger, nullable=False),
)
"""A table with a row per sink. ``definition``: JSON of a sink that the API has defined; null if the sink is in
``center.yaml``; `ENDING` if the sink is deleted and its alerts have not ended yet. ``replay_after``: the position that
an operator has requested. ``trimmed``: answers up to this id were deleted when the row was last written."""

memories = Table(
    "sink_memories",
    metadata,
    Column("name", Identifier(63), primary_key=True),
    Column("answer_id", BigInteger, nullable=False),
    Column("late", BigInteger, nullable=False),
    Column("state", FreeText, nullable=False),
)
"""The states of sinks whose systems do not store a position (`SinkMemory`)."""

asides = Table(
    "sink_asides",
    metadata,
    Column("name", Identifier(63), primary_key=True),
    Column("query", Identifier(128), primary_key=True),
    Column("version", BigInteger, primary_key=True),
    Column("answer_id", BigInteger, nullable=False),
    Column("problem", FreeText, nullable=False),
)
"""Queries that a sink has set aside: it could not write their answers, but answers of other queries. Each row has the
last answer that the sink has written."""

MAX_PROBLEM = 2_000
ENDING = "{}"
"""The definition of a deleted sink of the kind `alerts` until its alerts have ended. Readers do not see such a sink."""
REFUSED = "refused"
"""The first key in the state of a sink that counts the samples that its system refuses."""
_NEW = {
    "paused": False, "answer_id": 0, "late": 0, "answers": 0, "rows": 0, "problem": "", "problem_since_ms": 0,
    "trimmed": 0, "gap_from": 0, "gap_through": 0, "owner": "", "epoch": 0, "until_ms": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SinkStatus:
    """The state of a sink.

    Attributes:
        definition: the definition, if the API has defined the sink; None if the sink is in ``center.yaml``.
        position: the position up to which the sink has written; 0 if the sink was never open.
        replay_after: id of an answer. The sink will begin again after this answer; None if no replay is requested.
        answers, rows: numbers of answers and rows that the sink has written since it was defined.
        problem: why the last attempt failed; empty if it did not fail.
        problem_since_ms: wall time of the first failure since the last success; 0 if the last attempt did not fail.
        gap: first and last id of answers that were deleted before the sink had them; None if there are no such answers.
        owner: name of the process that runs the sink; empty if no process runs it.
        epoch: number of times that a process has taken the sink.
        until_ms: end of the owner's lease, on the owner's clock.
    """

    name: str
    definition: Mapping[str, Any] | None
    paused: bool
    position: Position
    replay_after: int | None
    answers: int
    rows: int
    problem: str
    problem_since_ms: int
    gap: tuple[int, int] | None
    owner: str
    epoch: int
    until_ms: int

    def is_run(self, now_ms: int) -> bool:
        """Returns whether a process runs the sink."""
        return bool(self.owner) and self.until_ms > now_ms

    def trouble(self, now_ms: int) -> str:
        """Returns why no answers are written. Empty if answers are written, or if an operator has paused the sink."""
        if self.paused:
            return ""
        nobody = "" if self.is_run(now_ms) else "no process `edgewater center sink` runs it"
        return self.problem or nobody


class Aside(NamedTuple):
    """The last answer of a set-aside query that the sink has written, and why it could not write the next one."""

    answer_id: int
    problem: str


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
            with schema_transaction(self._database, metadata):
                pass
            self._is_prepared = True
        return self._database

    def statuses(self) -> list[SinkStatus]:
        """Returns the states of all sinks that the API has defined or that a process has run, sorted by name."""
        with read_transaction(self._engine) as connection:
            rows = connection.execute(select(sinks).order_by(sinks.c.name))
            return [_status(row) for row in rows if row.definition != ENDING]

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
        return _status(row)

    def lowest_answer(self) -> int | None:
        """Returns the id of the newest answer that all sinks have, or None if there is no sink."""
        with read_transaction(self._engine) as connection:
            lowest = func.min(case((sinks.c.replay_after.is_(None), sinks.c.answer_id), else_=sinks.c.replay_after))
            is_read = sinks.c.definition.is_(None) | (sinks.c.definition != ENDING)
            queries = select(lowest).where(is_read), select(func.min(asides.c.answer_id))
            found = [connection.execute(query).scalar_one() for query in queries]
        return min((int(value) for value in found if value is not None), default=None)

    # Methods for operators

    def define(self, name: str, document: Mapping[str, Any]) -> bool:
        """Stores a definition, and returns whether the sink is new. If an existing definition changes, the sink keeps
        its position.
        """
        with write_transaction(self._engine) as connection:
            before = connection.execute(select(sinks.c.definition).where(sinks.c.name == name)).one_or_none()
            if before is None:
                connection.execute(insert(sinks).values(name=name, definition=json.dumps(document), **_NEW))
            else:
                changed = update(sinks).where(sinks.c.name == name).values(definition=json.dumps(document))
                connection.execute(changed)
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
                connection.execute(insert(sinks).values(name=name, definition=None, **_NEW))
                row = _row(connection, name)
            if row.owner not in ("", owner) and row.until_ms > now_ms:
                return None
            # The sink's system may have an epoch from after the backup that was restored.
            epoch = max(int(row.epoch), restored_at_ms(connection)) + 1
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
        position: Position | None = None,
        replayed: int | None = None,
        answers: int = 0,
        rows: int = 0,
        trimmed: int | None = None,
        problem: str | None = None,
        now_ms: int = 0,
    ) -> SinkStatus:
        """Renews the lease, stores the sink's progress since the last report, and returns the sink's state.

        Args:
            position: the position of the sink; None if it has not changed.
            replayed: the `replay_after` after which the sink has begun again; None if it has not begun again.
            answers, rows: numbers of answers and rows that were written since the last report.
            trimmed: answers up to this id are deleted. If the sink lacks some of them, the state has a gap.
            problem: why the last attempt failed; empty if it did not fail. If None, the stored problem stays.

        Raises:
            LeaseLost: another process has taken the sink, or the sink is no longer defined.
        """
        with write_transaction(self._engine) as connection:
            row = connection.execute(select(sinks).where(sinks.c.name == name).with_for_update()).one_or_none()
            restored = restored_at_ms(connection)
            if row is None or row.epoch != epoch or epoch <= restored:
                raise LeaseLost(f"sink {name} is run by another process, or is no longer defined")
            values: dict[str, Any] = {
                "until_ms": until_ms,
                "answers": row.answers + answers,
                "rows": row.rows + rows,
            }
            has = row.answer_id
            if position is not None:
                values |= {"answer_id": position.answer_id, "late": position.late}
                has = position.answer_id
            if replayed is not None and replayed == row.replay_after:
                values["replay_after"] = None
            if trimmed is not None and trimmed > row.trimmed:
                values["trimmed"] = trimmed
                # A new sink begins with the stored answers, so answers that were deleted before are not a gap.
                if row.epoch > restored + 1 or row.answer_id:
                    values |= _gap(row, has, trimmed)
            if problem is not None:
                values |= {
                    "problem": problem[:MAX_PROBLEM],
                    "problem_since_ms": 0 if not problem else row.problem_since_ms or now_ms,
                }
            connection.execute(update(sinks).where(sinks.c.name == name).values(**values))
            return _status(_row(connection, name))

    def memory(self, name: str, epoch: int) -> SinkMemory:
        """Returns the memory of a sink, for the process that has taken the sink with an epoch."""
        return _Memory(self._engine, name, epoch)

    def asides(self, name: str) -> dict[QueryRef, Aside]:
        """Returns the queries that are set aside by a sink."""
        c = asides.c
        with read_transaction(self._engine) as connection:
            rows = connection.execute(select(c.query, c.version, c.answer_id, c.problem).where(c.name == name)).all()
        return {QueryRef(query, version): Aside(answer_id, problem) for query, version, answer_id, problem in rows}

    def set_asides(self, name: str, epoch: int, queries: Mapping[QueryRef, Aside]) -> None:
        """Stores the queries that are set aside by a sink.

        Raises:
            LeaseLost: another process has taken the sink, or the sink is no longer defined.
        """
        with write_transaction(self._engine) as connection:
            _require_epoch(connection, name, epoch)
            connection.execute(delete(asides).where(asides.c.name == name))
            for ref, each in queries.items():
                row = {"query": ref.name, "version": ref.version, "problem": each.problem[:MAX_PROBLEM]}
                connection.execute(insert(asides).values(name=name, answer_id=each.answer_id, **row))

    def memories(self) -> dict[str, str]:
        """Returns the states that sinks have saved, by name of the sink."""
        with read_transaction(self._engine) as connection:
            states: dict[str, str] = dict(connection.execute(select(memories.c.name, memories.c.state)).all())
        return states

    def refused(self) -> dict[str, int]:
        """Returns, by sink, the number of samples that its system has refused."""
        c = memories.c
        counting = select(c.name, c.state).where(c.state.startswith(f'{{"{REFUSED}"', autoescape=True))
        with read_transaction(self._engine) as connection:
            return {name: json.loads(state)[REFUSED] for name, state in connection.execute(counting)}

    def release(self, name: str, epoch: int) -> None:
        """Frees the lease of a sink if `epoch` is still the sink's epoch."""
        with write_transaction(self._engine) as connection:
            mine = (sinks.c.name == name) & (sinks.c.epoch == epoch)
            connection.execute(update(sinks).where(mine).values(owner=""))

    def _change(self, name: str, **values: Any) -> None:
        with write_transaction(self._engine) as connection:
            if connection.execute(update(sinks).where(sinks.c.name == name).values(**values)).rowcount == 0:
                raise _unknown(name)


class _Memory:
    def __init__(self, engine: Engine, name: str, epoch: int) -> None:
        self._engine, self._name, self._epoch = engine, name, epoch

    def load(self) -> tuple[Position, str] | None:
        c = memories.c
        with read_transaction(self._engine) as connection:
            row = connection.execute(select(c.answer_id, c.late, c.state).where(c.name == self._name)).one_or_none()
        return None if row is None else (Position(row.answer_id, row.late), row.state)

    def save(self, position: Position, state: str) -> None:
        with write_transaction(self._engine) as connection:
            _require_epoch(connection, self._name, self._epoch)
            row = {"name": self._name, "answer_id": position.answer_id, "late": position.late, "state": state}
            upsert(connection, memories, [row])


def _delete_state(connection: Connection, name: str) -> None:
    for table in (memories, asides):
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


def _unknown(name: str) -> NotFound:
    return NotFound(f"there is no sink {name}; `edgewater sinks ls` lists all")


def _status(row: Row[Any]) -> SinkStatus:
    return SinkStatus(
        row.name,
        None if row.definition is None else json.loads(row.definition),
        row.paused,
        Position(row.answer_id, row.late),
        row.replay_after,
        row.answers,
        row.rows,
        row.problem,
        row.problem_since_ms,
        (row.gap_from, row.gap_through) if row.gap_through else None,
        row.owner,
        row.epoch,
        row.until_ms,
    )

"""`ResultStore`: merged slices, answers, and the position up to which each query's frames were applied.

Only the process with a driver's lease writes, and only the queries of its partition. Any number of processes read. A
micro-batch, the ledger's new state, the resulting answers and the consumed positions are one transaction. If Spark runs
a batch again, the store finds its positions consumed and changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import Connection, delete, insert, select, update

from center.ledger import (
    AT_ONCE_MS,
    Emission,
    FramesMerged,
    FrameSummary,
    Ledger,
    LedgerEvent,
    LedgerTransaction,
    QueryChanges,
    QueryTooLarge,
    SlicesRefused,
    TimeAdvanced,
    pack_state,
)
from center.results import lease as leases
from center.results import schema as t
from center.results import writes
from center.results.answers import AnswerReader
from center.results.corrections import lock_corrected, next_correction, state_earlier_late_records, write_corrections
from center.results.lease import Lease, LeaseLost
from center.storage.database import (
    open_engine,
    read_transaction,
    require_store_format,
    rows_among,
    schema_transaction,
    write_transaction,
)
from center.storage.delta_segments import Delta, DeltaSegments, SegmentRange, SliceSpan, SpanMerge, SpanPart
from center.storage.lineage import Lineage, raise_mark, read_lineage, write_lineage
from center.storage.query_partition import ALL_QUERIES, QueryPartition
from edgewater.base.errors import Conflict, StorageError
from edgewater.model.registered_query import query_from_key, query_key
from edgewater.wire import QueryRef

FORMAT = 2  # format: of the tables, the ledger's state and the answers
"""The format of the tables, the ledger's state and the answers. Increment it with each change after which an older
release cannot read new data, or this release cannot read old data. Format 1 (0.3) has other names of leases."""
REVISIONS = "revisions"
"""The counter that each new answer's revision exceeds. It is set when the store is restored."""
STEP, DRIVERS = "step", "drivers"
"""Counters: each partition has the first two; the last one is the number of partitions."""
MAX_OPEN_WINDOWS = 500_000
"""Maximum windows of a query that are not final. They are in the job's memory."""


@dataclass(frozen=True, slots=True)
class _Term:
    """A lease that this store has taken; epoch 0: no driver has ever led the store."""

    partition: QueryPartition = ALL_QUERIES
    epoch: int = 0
    lease_ms: int = 0


class ResultStore(AnswerReader):
    """Opens the store and creates its tables if they are missing.

    Every method is one transaction and blocks. Only the job calls `apply`, `tick` and `load_ledger`, from one thread at
    a time; the other methods are thread-safe.

    Args:
        url: SQLAlchemy URL; may be the catalog's.
        max_answer_bytes: size of one answer.
        costly_ms: a merge that takes longer is done by tasks.
        segments: the segments of large deltas. Only the job needs them.

    Attributes:
        correct_at_ms: wall time of the next `correct` that is needed; None: no final answer lacks late records.

    Raises:
        InvalidConfig: not a URL of SQLite or PostgreSQL.
        StorageError: the database cannot be used. Every method raises it too.
        IncompatibleState: another release wrote the store in another format.
    """

    def __init__(
        self,
        url: str,
        max_answer_bytes: int = writes.MAX_ANSWER_BYTES,
        *,
        costly_ms: float = writes.COSTLY_MS,
        segments: DeltaSegments = DeltaSegments(None),  # noqa: B008
    ) -> None:
        super().__init__(open_engine(url))
        self.segments, self._merging = segments, writes.Merging(segments, max_answer_bytes, costly_ms)
        self._merges: dict[SliceSpan, SpanMerge] = {}
        self._crowded: list[SliceSpan] = []
        self._term = _Term()
        # The term and the step of the ledger in memory. None: load the ledger before its next use.
        self._loaded: tuple[_Term, int] | None = None
        self.correct_at_ms: int | None = None
        self._refused: list[writes.RefusedDelta] = []
        with schema_transaction(self._engine, t.metadata) as connection:
            counters: dict[str, int] = dict(connection.execute(select(t.counters.c.name, t.counters.c.value)).all())
            if require_store_format(connection, "results", FORMAT, is_new=not counters, oldest=1) == 1:
                leases.migrate(connection)
            for name, value in (("answer", 0), (DRIVERS, 1), (REVISIONS, 0), (writes.TRIMMED, 0)):
                if name not in counters:
                    connection.execute(insert(t.counters).values(name=name, value=value))
            if "late" in counters:
                state_earlier_late_records(connection)
                connection.execute(delete(t.counters).where(t.counters.c.name == "late"))
            if counters.get(DRIVERS, 1) == 1:
                _add_partition(connection, ALL_QUERIES)

    def close(self) -> None:
        self._engine.dispose()

    def leases(self) -> dict[QueryPartition, Lease]:
        """Returns the present lease of each partition."""
        with read_transaction(self._engine) as connection:
            partitions = QueryPartition.all(writes.read_counter(connection, DRIVERS))
            return {partition: leases.read(connection, partition) for partition in partitions}

    def lease(self, partition: QueryPartition = ALL_QUERIES) -> Lease:
        """Returns the present lease of one partition."""
        with read_transaction(self._engine) as connection:
            return leases.read(connection, partition)

    def take_lease(
        self, owner: str, seen: Lease, lease_ms: int, now_ms: int, partition: QueryPartition = ALL_QUERIES
    ) -> bool:
        """Takes the lease for `lease_ms` if it still equals `seen`. The ledger is loaded before its next use.

        Each `apply` and `tick` that writes, and each `renew_lease`, extends the lease by `lease_ms` from that time.
        """
        with write_transaction(self._engine) as connection:
            epoch = leases.take(connection, partition, owner, seen, now_ms + lease_ms)
        if epoch is None:
            return False
        self._term = _Term(partition, epoch, lease_ms)
        return True

    def divide(self, drivers: int, seen: Mapping[QueryPartition, Lease]) -> bool:
        """Divides the queries among another number of drivers, if all leases still equal `seen`.

        Then all leases are free.
        """
        try:
            with write_transaction(self._engine) as connection:
                leases.end(connection, seen)
                for partition in QueryPartition.all(drivers):
                    _add_partition(connection, partition)
                connection.execute(update(t.counters).where(t.counters.c.name == DRIVERS).values(value=drivers))
        except LeaseLost:
            return False
        return True

    @property
    def partition(self) -> QueryPartition:
        """The partition of the lease that this store has taken last."""
        return self._term.partition

    @property
    def epoch(self) -> int:
        """The epoch of this lease."""
        return self._term.epoch

    def named_segments(self) -> tuple[set[str], set[str]]:
        """Returns the segments that deltas are in, or merges for answers, and `QueryPartition.directory` of each
        partition.
        """
        with read_transaction(self._engine) as connection:
            partitions = {p.directory for p in QueryPartition.all(writes.read_counter(connection, DRIVERS))}
            named = writes.named_segments(connection)
        merges = [merge.data for merge in list(self._merges.values())]
        return named | {data.segment for data in merges if isinstance(data, SegmentRange)}, partitions

    def renew_lease(self, now_ms: int, key: str | None = None) -> None:
        """Extends the lease.

        Raises:
            LeaseLost: another process has taken it, or the query `key` is not in its partition.
        """
        term = self._term
        if key is not None and key not in term.partition:
            raise LeaseLost(f"query {key} is not of partition {term.partition}, which this process leads now")
        with write_transaction(self._engine) as connection:
            leases.hold(connection, term.partition, term.epoch, now_ms + term.lease_ms)

    def release_lease(self) -> None:
        """Frees the lease, so that another process need not wait for its end. Does nothing if the lease is lost."""
        with write_transaction(self._engine) as connection:
            leases.release(connection, self._term.partition, self._term.epoch)

    def consumed(self) -> dict[str, int]:
        """Returns, per query key, the position of the last applied frame; queries without applied frames are absent."""
        with read_transaction(self._engine) as connection:
            return _positions(connection)

    def load_ledger(self, ledger: Ledger) -> None:
        """Replaces the ledger's state by the last committed state of this partition's queries."""
        term, queries = self._term, t.ledger_queries.c
        with read_transaction(self._engine) as connection:
            correct_at_ms = next_correction(connection, term.partition)
            step = writes.read_counter(connection, term.partition.name(STEP))
            revisions_after = restored_at_ms(connection)
            keys = [key for key in connection.scalars(select(queries.query)) if key in term.partition]
            snapshots = _snapshots(connection, keys)
        ledger.load(snapshots, revisions_after)
        self._loaded, self.correct_at_ms, self._merges = (term, step), correct_at_ms, {}

    def _load_again(self, ledger: Ledger, transaction: LedgerTransaction) -> None:
        """Loads the queries that a failed transaction has touched, or all if the store has another step."""
        term, refs = self._loaded, list(transaction.touched)
        if term is not None and term[0] is self._term and not transaction.has_deleted:
            with read_transaction(self._engine) as connection:
                is_at_step = writes.read_counter(connection, self._term.partition.name(STEP)) == term[1]
                snapshots = _snapshots(connection, [query_key(ref) for ref in refs])
            if is_at_step:
                ledger.load_again({ref: snapshots.get(ref) for ref in refs})
                return
        self._loaded = None
        self.load_ledger(ledger)

    def apply(
        self,
        ledger: Ledger,
        deltas: Sequence[Delta],
        frames: Sequence[FrameSummary],
        through: Mapping[str, int],
        now_ms: int,
    ) -> list[Emission]:
        """Applies a micro-batch atomically.

        If a query's `through` position is already consumed, the query is skipped, with its deltas and frames.

        Args:
            deltas: the merged partials of exactly these frames.
            through: per query key, the position of the batch's last frame.

        Raises:
            Conflict: only some frames of a query were applied before (exclude those in `consumed` before merging),
                another job has written to the store, or a query is of another partition. LeaseLost: another job has
                taken the lease.
            NotFound: the ledger does not know the query of a frame: see `Ledger.handle`.
            QueryFailed: an answer of a query cannot be given. QueryTooLarge: it costs too much.
        """
        frames = list(frames)
        while True:
            try:
                return self._apply(ledger, deltas, frames, through, now_ms)
            except writes.DeltasRefused as exc:
                deltas = self._refuse(ledger, exc.refused, deltas, frames, now_ms)
            except writes.AnswersCostly as exc:
                for span in exc.spans:
                    ledger.note_costly(query_from_key(span.key))

    def _apply(
        self,
        ledger: Ledger,
        deltas: Sequence[Delta],
        frames: list[FrameSummary],
        through: Mapping[str, int],
        now_ms: int,
    ) -> list[Emission]:
        """As `apply`. Raises DeltasRefused: nothing is applied, but the batch can be applied without these deltas."""
        with self._transaction(ledger) as transaction, write_transaction(self._engine) as connection:
            loaded = self._begin_step(connection, now_ms)
            _require_own(loaded[0].partition, through)
            new = _not_applied(_positions(connection), through, frames)
            fresh = [f for f in frames if query_key(f.query) in new]
            applied = writes.applicable(ledger, [d for d in deltas if d.query in new], fresh, through)
            refused = writes.of_other_shapes(connection, applied)
            applied = writes.without(refused, applied, fresh)
            writes.weigh(ledger, applied)
            emissions = ledger.handle(FramesMerged(tuple(fresh), now_ms))
            _require_bounded(ledger, {f.query for f in fresh})
            stored, spent = writes.split_spent(ledger, emissions, applied)
            crowded = writes.add_deltas(connection, stored, ledger.on_query, self._merging)
            changes = transaction.changes()
            writes.write_ledger(connection, changes)
            writes.write_answers(connection, ledger, emissions, spent, {}, self._merging)
            writes.add_shipped(connection, [f for f in fresh if not ledger.is_deleted(f.query)])
            writes.set_consumed(connection, {key: position for key, position in through.items() if key in new})
        self._loaded = loaded
        self._note_late(changes)
        self._refused += refused
        self._crowded += crowded
        return emissions

    def tick(self, ledger: Ledger, events: Sequence[LedgerEvent], now_ms: int) -> list[Emission]:
        """Applies events (other than `FramesMerged`) and then ``TimeAdvanced(now_ms)``, atomically.

        Writes to the database only if something changed, so it may be called often.

        Raises:
            Conflict: another job has written to the store, or an event is of another partition's query. LeaseLost:
                another job has taken the lease.
            QueryFailed: a query cannot be advanced, or one of its answers cannot be given: see `Ledger.pause`.
            AnswersCostly: tasks must merge answers first (`keep_merge`).
        """
        if any(isinstance(e, FramesMerged) for e in events):
            raise ValueError("frames are applied with their deltas, by ResultStore.apply")
        while True:
            try:
                return self._tick(ledger, [*events, TimeAdvanced(now_ms)], now_ms)
            except writes.DeltasRefused as exc:
                self._refuse(ledger, exc.refused, (), [], now_ms)

    def _tick(self, ledger: Ledger, events: Sequence[LedgerEvent], now_ms: int) -> list[Emission]:
        with self._transaction(ledger) as transaction:
            emissions = [e for event in events for e in ledger.handle(event)]
            changes = transaction.changes()
            if changes or emissions:
                with write_transaction(self._engine) as connection:
                    loaded = self._begin_step(connection, now_ms)
                    _require_own(loaded[0].partition, [query_key(change.ref) for change in changes])
                    writes.write_ledger(connection, changes)
                    writes.write_answers(connection, ledger, emissions, (), self._merges, self._merging)
                self._loaded = loaded
                self._note_late(changes)
                answered = {query_key(e.query) for e in emissions}
                self._merges = {span: merge for span, merge in self._merges.items() if span.key not in answered}
        return emissions

    def correct(self, now_ms: int) -> int:
        """Writes the next corrections: final answers again that do not state all late records of their windows.

        A call examines at most `MAX_CORRECTED` windows, so that answers are hardly delayed.

        Returns:
            The number of corrections.

        Raises:
            LeaseLost: another job has taken the lease.
        """
        term = self._term
        with write_transaction(self._engine) as connection:
            leases.hold(connection, term.partition, term.epoch, now_ms + term.lease_ms)
            written = write_corrections(connection, term.partition, now_ms, restored_at_ms(connection))
            due_ms = next_correction(connection, term.partition)
        self.correct_at_ms = due_ms
        return written

    def _note_late(self, changes: Iterable[QueryChanges]) -> None:
        if any(change.final_spans for change in changes):
            self.correct_at_ms = AT_ONCE_MS

    def _refuse(
        self,
        ledger: Ledger,
        refused: Sequence[writes.RefusedDelta],
        deltas: Sequence[Delta],
        frames: list[FrameSummary],
        now_ms: int,
    ) -> list[Delta]:
        """Drops deltas that do not merge and states the loss. Returns the batch's other deltas.

        The loss of a batch's own deltas is stated in its frames, which are changed in place; the loss of stored deltas
        in the ledger.
        """
        others = writes.without(refused, deltas, frames)
        own = set(deltas) - set(others)
        stored = {r.delta for r in refused} - own
        if stored:
            with self._transaction(ledger) as transaction, write_transaction(self._engine) as connection:
                loaded = self._begin_step(connection, now_ms)
                _require_own(loaded[0].partition, [delta.query for delta in stored])
                for delta in stored:
                    if writes.drop_deltas(connection, delta, exactly=True) == 0:
                        # The failed transaction merged it from deltas of the slice, both stored and new.
                        writes.drop_deltas(connection, delta, exactly=False)
                        place = delta.query, delta.slice_start_ms
                        same = [writes.RefusedDelta(d, "") for d in others if (d.query, d.slice_start_ms) == place]
                        others = writes.without(same, others, frames)
                    ledger.handle(SlicesRefused(query_from_key(delta.query), (delta.slice_start_ms,)))
                writes.write_ledger(connection, transaction.changes())
            self._loaded = loaded
        self._refused += refused
        return others

    def take_crowded(self) -> list[SliceSpan]:
        """Returns the slices with too many deltas, whose merge is costly, since the last call."""
        crowded, self._crowded = self._crowded, []
        return crowded

    def part(self, span: SliceSpan, prefix: str) -> SpanPart:
        """Returns the deltas of a span for a task. Deltas that the database has are passed on as results of tasks are.

        Raises StorageError.
        """
        with read_transaction(self._engine) as connection:
            read = list(writes.read_span(connection, span))
        placed = self.segments.place(prefix, [delta for _, delta in read])
        ids = tuple(number for number, _ in read)
        return SpanPart(span, ids, tuple(delta.data for delta in placed), self._merging.max_answer_bytes)

    def keep_merge(self, ledger: Ledger, merge: SpanMerge, now_ms: int) -> None:
        """Replaces the deltas of a slice by their merge. A merge of several slices is kept in memory for `tick`.

        Raises as `tick`.
        """
        with self._transaction(ledger), write_transaction(self._engine) as connection:
            loaded = self._begin_step(connection, now_ms)
            _require_own(loaded[0].partition, [merge.span.key])
            is_replaced = writes.replace_deltas(connection, merge)
        self._loaded = loaded
        if not is_replaced:
            self._merges[merge.span] = merge

    def take_refused(self) -> list[writes.RefusedDelta]:
        """Returns the merged partials that were refused since the last call."""
        refused, self._refused = self._refused, []
        return refused

    @contextmanager
    def _transaction(self, ledger: Ledger) -> Iterator[LedgerTransaction]:
        """Opens a transaction of the stored ledger.

        If it fails, the ledger is loaded again, now or before its next use.
        """
        if self._loaded is None or self._loaded[0] is not self._term:
            self.load_ledger(ledger)
        try:
            with ledger.transaction() as transaction:
                yield transaction
        except Exception:
            try:
                self._load_again(ledger, transaction)
            except Exception:  # the store may be unreachable: the caller must see the first error
                self._loaded = None
            raise
        except BaseException:
            self._loaded = None
            raise

    def trim(self, before_ms: int, through: int | None = None) -> int:
        """Drops answers that were emitted before a wall time. Returns their number; 0: none remain to be dropped.

        A call drops at most a few hundred windows, so that the job is hardly delayed. A window is dropped with all its
        revisions when its final one is old enough. A window that is not final stays, however old. A deleted query's
        answers are dropped together when the newest one is old enough.

        Args:
            through: id of the newest answer that may be a dropped window's final one; None: any answer.
        """
        with write_transaction(self._engine) as connection:
            lock_corrected(connection)
            dropped, newest = writes.drop_answers(connection, before_ms, through)
            if newest > writes.read_counter(connection, writes.TRIMMED):
                connection.execute(update(t.counters).where(t.counters.c.name == writes.TRIMMED).values(value=newest))
            return dropped

    def _begin_step(self, connection: Connection, now_ms: int) -> tuple[_Term, int]:
        """Locks out the partition's other writers, and checks that this process leads and that its ledger is the stored
        one.

        Returns the term and the step after this transaction. The ledgers differ if the confirmation of a commit was
        lost. The term is the term in which the ledger was loaded. Meanwhile another thread may have taken the lease of
        another partition.
        """
        assert self._loaded is not None, "within a transaction of the ledger"
        term, step = self._loaded
        leases.hold(connection, term.partition, term.epoch, now_ms + term.lease_ms)
        counter = t.counters.c.name == term.partition.name(STEP)
        stored = int(connection.execute(select(t.counters.c.value).where(counter).with_for_update()).scalar_one())
        if stored != step:
            raise Conflict(f"the result store is at step {stored}, this job's ledger at {step}: try again")
        connection.execute(update(t.counters).where(counter).values(value=stored + 1))
        return term, stored + 1

    def lineage(self) -> Lineage:
        """Returns the number of the center and the mark in the store."""
        with read_transaction(self._engine) as connection:
            return read_lineage(connection, t.counters)

    def raise_mark(self, mark: int) -> None:
        with write_transaction(self._engine) as connection:
            raise_mark(connection, t.counters, mark)

    def set_lineage(self, lineage: Lineage) -> None:
        with write_transaction(self._engine) as connection:
            write_lineage(connection, t.counters, lineage)

    def begin_after_restore(self, lineage: Lineage, now_ms: int) -> None:
        """Continues with a store that may be older than answers that readers have.

        New answers get revisions and ids above `now_ms`. These are above all earlier ones, as no window gets an answer
        each millisecond.
        """
        with write_transaction(self._engine) as connection:
            write_lineage(connection, t.counters, lineage)
            _raise_numbers(connection, now_ms)

    def require_newer(self, ledger: Ledger, since_ms: int) -> None:
        """Raises the numbers of new answers as `begin_after_restore` does, if an edge has shown that the stores lack
        frames that the center has acknowledged.

        Args:
            since_ms: the wall time at which an edge last showed this; 0: never.
        """
        if since_ms <= ledger.revisions_after:
            return
        with write_transaction(self._engine) as connection:
            if since_ms > restored_at_ms(connection):  # no other driver has done it
                _raise_numbers(connection, since_ms)
        self._loaded = None
        self.load_ledger(ledger)


def _raise_numbers(connection: Connection, now_ms: int) -> None:
    for name in (REVISIONS, "answer"):
        value = max(now_ms, writes.read_counter(connection, name) + 1)
        connection.execute(update(t.counters).where(t.counters.c.name == name).values(value=value))


def restored_at_ms(connection: Connection) -> int:
    """Returns the wall time at which the store was last restored; 0: never. Numbers that readers or other systems may
    have, such as revisions, are higher from then on.
    """
    return writes.read_counter(connection, REVISIONS)


def _add_partition(connection: Connection, partition: QueryPartition) -> None:
    """Adds the rows of a partition, if it has none."""
    leases.create(connection, partition)
    counter = partition.name(STEP)
    if connection.execute(select(t.counters.c.value).where(t.counters.c.name == counter)).scalar() is None:
        connection.execute(insert(t.counters).values(name=counter, value=0))


def _snapshots(connection: Connection, keys: Sequence[str]) -> dict[QueryRef, bytes | None]:
    """Returns the stored states of queries, as `Ledger.load` takes them."""
    queries, entries = t.ledger_queries.c, t.ledger_entries.c
    states = list(rows_among(connection, select(queries.query, queries.state), queries.query, keys))
    by_query: defaultdict[str, list[tuple[str, int, str]]] = defaultdict(list)
    columns = select(entries.query, entries.kind, entries.start_ms, entries.state)
    for key, kind, start, text in rows_among(connection, columns, entries.query, keys):
        by_query[key].append((kind, start, text))
    return {query_from_key(key): None if state is None else pack_state(state, by_query[key]) for key, state in states}


def _require_own(partition: QueryPartition, keys: Iterable[str]) -> None:
    """Raises Conflict for a query of another partition: the values to write were prepared in another term."""
    if foreign := [key for key in keys if key not in partition]:
        raise Conflict(f"query {foreign[0]} is not of partition {partition}, which this driver leads: try again")


def _positions(connection: Connection) -> dict[str, int]:
    positions: dict[str, int] = dict(connection.execute(select(t.consumed.c.query, t.consumed.c.position)).all())
    return positions


def _not_applied(consumed: Mapping[str, int], through: Mapping[str, int], frames: Iterable[FrameSummary]) -> set[str]:
    """Returns the queries of the batch that were not applied before. Raises Conflict if a query was applied in part."""
    new = {key for key, position in through.items() if position > consumed.get(key, 0)}
    for frame in frames:
        key = query_key(frame.query)
        if key not in through or frame.position > through[key]:
            raise StorageError(f"query {key}: a frame at {frame.position}, but the batch ends at {through.get(key)}")
        if key in new and frame.position <= consumed.get(key, 0):
            raise Conflict(
                f"query {key}: the frame at {frame.position} was applied already, and the batch ends at"
                f" {through[key]}: exclude its partials before merging"
            )
    return new


def _require_bounded(ledger: Ledger, queries: Iterable[QueryRef]) -> None:
    """Raises QueryTooLarge for a query with more open windows than allowed in memory."""
    for ref in queries:
        if not ledger.is_deleted(ref) and (count := ledger.open_windows(ref)) > MAX_OPEN_WINDOWS:
            raise QueryTooLarge(ref, f"{count} windows are not final; expected at most {MAX_OPEN_WINDOWS}")

"""The interface of sinks, and the kinds of sinks that packages provide.

A package provides a `SinkKind` through the entry-point group `edgewater.sinks`. A center loads the packages only if a
sink is defined.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa
from pydantic import BaseModel

from center.catalog import Catalog
from edgewater.answers import Facts, Phase
from edgewater.answers.statement import Contract, Statement
from edgewater.base.errors import StorageError
from edgewater.base.plugins import KindLoader
from edgewater.model.json_types import Document, Group
from edgewater.model.own_columns import OWN_COLUMNS
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import query_key
from edgewater.wire import QueryRef

GROUP = "edgewater.sinks"


@dataclass(frozen=True, slots=True)
class SinkQuery:
    """A query whose answers a sink gets.

    Attributes:
        schema: the columns of the rows of answers. First come ``window_start``, ``window_end``, ``phase``,
            ``revision``, ``completeness``, ``given_at``, ``contract`` and ``withheld``, then the groups, then the
            measures.
        is_typed: whether `schema` has the types of answers. Before an edge has connected, the columns of the stream are
            not known. `open` is then called again before the first answer.
    """

    ref: QueryRef
    spec: QuerySpec
    schema: pa.Schema
    is_typed: bool = True


@dataclass(frozen=True, slots=True)
class SinkAnswer:
    """The newest revision of a window. It replaces all rows of the window in the sink's system.

    Attributes:
        window_start_ms, window_end_ms: event times. If they are equal, the window's session was merged into another
            session. The window then has no answer, and `rows` is empty.
        rows: a row per group, with the columns of `SinkQuery.schema`.
        group_columns: names of the columns of groups.
        removed: returns the groups that earlier revisions of the window had and `rows` lacks. Each group is a mapping
            of names to values. A sink that stores each group separately deletes these groups.
        statement: the JSON of the answer without its rows: ``quality``, ``contract``, ``total``, ``rest``, …
        data_id: of a correction, the id of the answer that it corrects. Both have the same values.
        repeats: whether the sink was given the values before: it is a correction, and the corrected answer is not
            newer than the position of the query. A system that only adds rows gets no row of such an answer.
        stated: the typed part of the same: the facts of the answer, its error by cause, and its contract.
        of_others: returns `rows` with the bounds of the records of the other edges, if edges are missing or have left.
            None: the answer has all edges.
    """

    query: QueryRef
    window_start_ms: int
    window_end_ms: int
    revision: int
    phase: Phase
    answered_at_ms: int
    answer_id: int
    rows: pa.Table = field(repr=False)
    statement: Document = field(repr=False)
    group_columns: tuple[str, ...] = ()
    removed: Callable[[], list[Group]] = field(default=list, repr=False)
    data_id: int = 0
    repeats: bool = False
    stated: Statement = field(default=Statement(Facts(0, 0, 0.0), {}, Contract({})), repr=False)
    of_others: Callable[[], pa.Table] | None = field(default=None, repr=False)

    @property
    def own_columns(self) -> dict[str, str]:
        """The names in `rows` of `OWN_COLUMNS`. They differ if a group or a measure has the name."""
        return dict(zip(OWN_COLUMNS, self.rows.column_names, strict=False))

    @property
    def data_of(self) -> int | None:
        """Of a correction: the revision of the answer that it corrects."""
        revision = self.statement.get("data_of")
        return revision if isinstance(revision, int) else None

    @property
    def completeness(self) -> float:
        return self.stated.facts.ratio

    @property
    def contract(self) -> str:
        """The codes of the contract of the whole answer, as in the column ``contract``."""
        return self.stated.contract.codes

    @property
    def measure_columns(self) -> list[str]:
        """The names of the columns of measures."""
        return [n for n in self.rows.column_names[len(OWN_COLUMNS) :] if n not in self.group_columns]


class Sink(Protocol):
    """A system that answers are written to, the target. One thread calls all methods.

    A target stores a position per query: the id of the last answer that it has. It stores the position together with
    the answers, and with the center and the sink that have written them (`SinkContext.require_own`).

    A sink may have a method ``tick(is_current)``. It is called about ten times a second while the sink is open and not
    paused. ``is_current`` says whether the sink has all answers. A method ``follow(queries)`` is called with all
    queries of the sink after `open`, and whenever they change. A sink may also have a property ``problem``. While a
    part of the sink does not work, the property returns a text that says why. Otherwise it returns an empty text.
    A sink that goes on although the target will never accept a part of an answer counts these parts in ``refused``.
    ``refusal`` then names query, window and reason of the last one.

    If a method raises an exception, the sink is closed, and another one is opened, without a query. If that succeeds,
    the queries are tried one by one, and a query that fails waits alone. The message of the exception is shown to
    readers of the sink's status, so it must not contain secrets.
    """

    def open(self, queries: Sequence[SinkQuery]) -> Mapping[QueryRef, int]:
        """Connects, prepares the target for the answers of these queries, and returns the stored positions.

        A query is opened before its first `write`. `open` is called again for further queries, and for queries whose
        types were unknown.

        Args:
            queries: may be empty, to find out whether the target can be used.

        Returns:
            The positions of those of these queries that this center has written to the target.

        Raises:
            StorageError: the target cannot be used, or has answers to one of the queries that another center wrote.
        """

    def write(self, answers: Sequence[SinkAnswer], positions: Mapping[QueryRef, int]) -> None:
        """Writes answers and positions. When it returns, all of them are durable.

        The answers and the position of a query become visible together. If the call fails, it may be repeated with
        other queries. If the process was killed before it received the success, it is repeated with the same answers.

        An answer is written if its revision is not lower than the window's revision in the target. A correction is a
        higher revision, too, although only its quality and its bounds differ.

        Args:
            answers: at most one per window, by ascending `answer_id`; may be empty.
            positions: the positions to store. A position may be lower than the stored one: an operator has requested
                that answers are written again. A target to which rows are only added keeps its position then.
        """

    def close(self) -> None:
        """Releases the resources that `open` has taken. Called once, also after a failure."""


class SinkMemory:
    """Stores a state, for sinks whose target cannot store positions. This class stores it until the process ends.

    A center stores it in its database. The epoch fences the state: a process that no longer runs the sink cannot write
    it.
    """

    def __init__(self) -> None:
        self._positions: dict[QueryRef, int] = {}
        self._state: str | None = None

    def load(self, queries: Iterable[QueryRef]) -> tuple[dict[QueryRef, int], str] | None:
        """Returns the positions of these queries and the state that `save` has stored, or None if nothing was
        stored.
        """
        found = {ref: self._positions[ref] for ref in queries if ref in self._positions}
        return None if self._state is None else (found, self._state)

    def save(self, positions: Mapping[QueryRef, int], state: str) -> None:
        """Stores positions and a state text durably, together. Positions of other queries stay.

        Raises:
            LeaseLost: another process runs the sink.
        """
        self._positions, self._state = {**self._positions, **positions}, state


@dataclass(frozen=True, slots=True)
class SinkContext:
    """The arguments that a center passes to a sink.

    Attributes:
        name: name of the sink.
        epoch: increases whenever another process takes over the sink. A target that can compare numbers refuses writes
            of an earlier epoch.
        memory: stores a state at the center.
        now_ms: returns the wall time.
        monotonic: returns the seconds of a clock that nobody sets.
        catalog: the registered queries, the edges and the alarms of the center; None while a definition is only
            checked.
        center: a random number of the center. A restored center has the same number.
        earlier: names of sinks that release 0.3 of this center has run. Targets of 0.3 do not name their center.
        running: returns the names of the other sinks of this center that a process runs.
    """

    name: str
    epoch: int = 0
    memory: SinkMemory = field(default_factory=SinkMemory)
    now_ms: Callable[[], int] = lambda: 0
    monotonic: Callable[[], float] = time.monotonic
    catalog: Catalog | None = None
    center: int = 0
    earlier: Collection[str] = ()
    running: Callable[[], Collection[str]] = tuple

    def require_own(self, target: str, query: QueryRef, center: int | None, sink: str) -> None:
        """Checks who has written the answers to a query in the target.

        Args:
            target: a text that names the target.
            center: the number of the center that is stored there; None: release 0.3 has stored none.
            sink: the name of the sink that is stored there.

        Raises:
            StorageError: another center has written the answers, or another sink of this center writes them now.
        """
        remedy = "let this sink write to another place, or remove the answers there"
        where = f"{target} has answers to {query_key(query)}"
        if center is None and sink not in self.earlier:
            raise StorageError(
                f"{where} of release 0.3, which this center has not written with a sink of this name: {remedy}"
            )
        if center not in (None, self.center):
            raise StorageError(f"{where} of the center {center:x}, and this is the center {self.center:x}: {remedy}")
        if sink != self.name and sink in self.running():
            raise StorageError(f"{where} of the sink {sink} of this center: delete one of the two sinks")


class SinkKind(Protocol):
    """A kind of sinks.

    Attributes:
        name: the value of ``kind`` in the definition of a sink.
        config: the model of the options.

    A kind may have the attributes ``begin``, ``min_phase`` and ``batch_ms``. They are the defaults for the keys of the
    same names in the definition of a sink. No sink of the kind gets answers of a phase before ``min_phase``. The
    options may have an attribute ``reads``: the names of the queries that the sink needs. They are the default of the
    key ``queries``. If the memory of the center has the positions, the options have an attribute ``target``: a text
    that names the target. With another target, the memory is new.

    >>> class ListSink:
    ...     def __init__(self, rows):
    ...         self.rows, self.positions = rows, {}
    ...     def open(self, queries):
    ...         return {query.ref: self.positions[query.ref] for query in queries if query.ref in self.positions}
    ...     def write(self, answers, positions):
    ...         self.rows += [row for answer in answers for row in answer.rows.to_pylist()]
    ...         self.positions |= positions
    ...     def close(self):
    ...         pass
    >>> class ListConfig(BaseModel, extra="forbid"):
    ...     pass
    >>> class ListKind:
    ...     name = "list"  # in a definition: kind: list
    ...     config = ListConfig
    ...     def sink(self, options, context):
    ...         return ListSink([])
    >>> sink = ListKind().sink(ListConfig(), SinkContext("mine"))
    >>> sink.write([], {QueryRef("hits", 1): 42})
    >>> sink.positions
    {QueryRef(name='hits', version=1): 42}
    """

    name: str
    config: type[BaseModel]

    def sink(self, options: Any, context: SinkContext) -> Sink:
        """Builds a sink. Does not connect to its system.

        Args:
            options: an instance of `config`.

        Raises:
            InvalidConfig: an option cannot be used.
        """


class SinkPluginWarning(UserWarning):
    """An entry point of `edgewater.sinks` cannot be used. Definitions that name its kind are refused."""


class SinkKinds(KindLoader[SinkKind]):
    """The kinds of sinks of installed packages."""

    group = GROUP
    provides = "sinks"
    warning = SinkPluginWarning
    method = "sink"
    example = "postgres"


KINDS = SinkKinds()

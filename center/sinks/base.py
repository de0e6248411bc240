"""The interface of sinks, and the kinds of sinks that packages provide.

A package provides a `SinkKind` through the entry-point group `edgewater.sinks`. A center loads the packages only if a
sink is defined.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
from pydantic import BaseModel

from center.catalog import Catalog
from center.ledger import Phase
from edgewater.model.key_texts import OWN_COLUMNS
from edgewater.model.query import QuerySpec
from edgewater.runtime.plugins import NAME, InvalidPlugin, PluginLoader, PluginOrigin
from edgewater.wire import QueryRef

GROUP = "edgewater.sinks"


class Position(NamedTuple):
    """The position up to which a sink has read the answers.

    Attributes:
        answer_id: id of the last answer, of any query, that the sink has; 0 if the sink has no answer.
        late: number of changes of final answers that the sink has (`AnswerReader.newest`).
    """

    answer_id: int = 0
    late: int = 0


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
    """

    query: QueryRef
    window_start_ms: int
    window_end_ms: int
    revision: int
    phase: Phase
    answered_at_ms: int
    answer_id: int
    rows: pa.Table = field(repr=False)
    statement: dict[str, Any] = field(repr=False)
    group_columns: tuple[str, ...] = ()
    removed: Callable[[], list[dict[str, Any]]] = field(default=list, repr=False)

    @property
    def own_columns(self) -> dict[str, str]:
        """The names in `rows` of `OWN_COLUMNS`. They differ if a group or a measure has the name."""
        return dict(zip(OWN_COLUMNS, self.rows.column_names, strict=False))

    @property
    def measure_columns(self) -> list[str]:
        """The names of the columns of measures."""
        return [n for n in self.rows.column_names[len(OWN_COLUMNS) :] if n not in self.group_columns]


class Sink(Protocol):
    """A system that answers are written to. One thread calls all methods.

    A sink may have a method ``tick(is_current)``. It is called about ten times a second while the sink is open and not
    paused. ``is_current`` says whether the sink has all answers. A sink may also have a property ``problem``. While a
    part of the sink does not work, the property returns a text that says why. Otherwise it returns an empty text.
    A further property ``refused`` is the number of samples that the system has refused and will never accept.

    If a method raises an exception, nothing was written. The sink is then closed, and opened again after a pause. If
    it fails again, its queries are tried one by one. A query that fails while the sink takes others is set aside, and
    written later. The message of the exception is shown to readers of the sink's status, so it must not contain
    secrets.
    """

    def open(self, queries: Sequence[SinkQuery]) -> Position | None:
        """Connects, prepares the system for the answers of these queries, and returns the stored position.

        Called before the first `write`, and again when the queries change.

        Returns:
            The position that the last `write` stored; None if the system has no position.
        """

    def write(self, answers: Sequence[SinkAnswer], position: Position) -> None:
        """Writes answers and the position. When it returns, both are durable. If it fails, neither is ever visible.

        If the process was killed before it received the success, `write` is called again with the same answers. An
        answer is written if its revision is not lower than the window's revision in the system. If only the quality has
        changed, the same revision is written again.

        Args:
            answers: at most one per window, by ascending `answer_id`; may be empty.
        """

    def close(self) -> None:
        """Releases the resources that `open` has taken. Called once after each `open`, also after a failure."""


class SinkMemory(Protocol):
    """Stores a state at the center, for sinks whose system cannot store a position.

    The epoch fences the state: a process that no longer runs the sink cannot write it.
    """

    def load(self) -> tuple[Position, str] | None:
        """Returns the position and the state that `save` has stored, or None if nothing was stored."""

    def save(self, position: Position, state: str) -> None:
        """Stores a position and a state text durably, together.

        Raises:
            LeaseLost: another process runs the sink.
        """


@dataclass(frozen=True, slots=True)
class SinkContext:
    """The arguments that a center passes to a sink.

    Attributes:
        name: name of the sink. Two sinks may write to one system; the name distinguishes their positions.
        epoch: increases whenever another process takes over the sink. A system that can compare numbers refuses writes
            of an earlier epoch.
        memory: stores a state at the center; None if there is no state, for example while a definition is only checked.
        now_ms: returns the wall time.
        monotonic: returns the seconds of a clock that nobody sets.
        catalog: the registered queries, the edges and the alarms of the center; None while a definition is only
            checked.
    """

    name: str
    epoch: int = 0
    memory: SinkMemory | None = None
    now_ms: Callable[[], int] = lambda: 0
    monotonic: Callable[[], float] = time.monotonic
    catalog: Catalog | None = None


class SinkKind(Protocol):
    """A kind of sinks.

    Attributes:
        name: the value of ``kind`` in the definition of a sink.
        config: the model of the options.

    A kind may have the attributes ``begin``, ``min_phase`` and ``batch_ms``. They are the defaults for the keys of the
    same names in the definition of a sink. No sink of the kind gets answers of a phase before ``min_phase``. The
    options may have an attribute ``reads``: the names of the queries that the sink needs. They are the default of the
    key ``queries``.
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


class SinkKinds(PluginLoader):
    """The kinds of sinks of installed packages."""

    group = GROUP
    provides = "sinks"
    warning = SinkPluginWarning

    def __init__(self, find: Callable[[], Iterable[EntryPoint]] | None = None) -> None:
        super().__init__(find)
        self._kinds: dict[str, SinkKind] = {}

    def get(self, name: str) -> SinkKind | None:
        """Returns the kind of this name, or None if no package provides it. The first call loads all packages."""
        self.load()
        return self._kinds.get(name)

    @property
    def names(self) -> list[str]:
        self.load()
        return sorted(self._kinds)

    def _register(self, provided: object, origin: PluginOrigin) -> None:
        name, config = getattr(provided, "name", None), getattr(provided, "config", None)
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise InvalidPlugin(f"the name of a kind of sinks is {name!r}; expected a text such as postgres")
        if not isinstance(config, type) or not issubclass(config, BaseModel):
            raise InvalidPlugin(f"the config of the kind {name} is {config!r}; expected a class of pydantic.BaseModel")
        if not callable(getattr(provided, "sink", None)):
            raise InvalidPlugin(f"the kind {name} has no method sink")
        self._check_free(name, name in self._kinds, "kind of sinks")
        self._kinds[name] = provided  # type: ignore[assignment]
        self.origins[name] = origin


KINDS = SinkKinds()

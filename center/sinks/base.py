"""The interface of sinks, and the kinds of sinks that packages provide through the entry-point group `edgewater.sinks`.

An entry point names a `SinkKind`. A center loads the packages only if a sink is defined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
from pydantic import BaseModel

from center.ledger import Phase
from edgewater.model.query import QuerySpec
from edgewater.runtime.plugins import NAME, InvalidPlugin, PluginLoader, PluginOrigin
from edgewater.wire import QueryRef

GROUP = "edgewater.sinks"


class Position(NamedTuple):
    """How far a sink has read.

    Attributes:
        answer_id: id of the last answer that the sink has, of any query; 0: the sink has no answer.
        late: the number of changes of final answers that the sink has (`AnswerReader.newest`).
    """

    answer_id: int = 0
    late: int = 0


@dataclass(frozen=True, slots=True)
class SinkQuery:
    """A query whose answers a sink gets.

    Attributes:
        schema: the columns of its rows. First come ``window_start``, ``window_end``, ``phase``, ``revision``,
            ``completeness``, ``given_at``, ``contract`` and ``withheld``, then the groups, then the measures.
        is_typed: whether `schema` has the types of answers. Before an edge has connected, no column of the stream is
            known. `open` is called again before the first answer.
    """

    ref: QueryRef
    spec: QuerySpec
    schema: pa.Schema
    is_typed: bool = True


@dataclass(frozen=True, slots=True)
class SinkAnswer:
    """The newest revision of a window. It replaces all rows of the window that the sink has.

    Attributes:
        window_start_ms, window_end_ms: both are equal, and `rows` is empty, if the session of the window was merged
            into another session. The window then has no answer any more.
        rows: a row per group, with the columns of `SinkQuery.schema`.
        group_columns: names of the columns of groups.
        removed: returns the groups that earlier revisions of the window had and `rows` lack, each as a mapping of
            names to values. A sink that stores each group separately deletes these groups.
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


class Sink(Protocol):
    """One system that answers are written to. One thread calls it.

    A sink may have a method ``tick(is_current)``. It is called about ten times a second while the sink is open and not
    paused; ``is_current`` says that the sink has all answers. A sink may have a property ``problem``. It returns a text
    while a part of the sink does not work, otherwise an empty text.

    Any exception means that nothing was written. The sink is then closed, and opened again after a pause. The message
    of the exception is shown to readers of the sink's status, so it must not contain secrets.
    """

    def open(self, queries: Sequence[SinkQuery]) -> Position | None:
        """Connects, prepares the system for the answers of these queries, and returns the stored position.

        Called before the first `write`, and again when the queries change.

        Returns:
            The position that the last `write` stored; None: the system has none.
        """

    def write(self, answers: Sequence[SinkAnswer], position: Position) -> None:
        """Writes answers and the position. Both are durable when it returns, or neither is ever visible.

        Called with the same answers again if the process was killed before it received the success. An answer is
        written if its revision is not lower than the revision that the system has of the window. The same revision
        comes again when its quality has changed.

        Args:
            answers: at most one per window, by ascending `answer_id`; may be empty.
        """

    def close(self) -> None:
        """Releases what `open` has taken. Called once after each `open`, also after a failure."""


class SinkMemory(Protocol):
    """Keeps a state at the center, for sinks whose system cannot store a position. The epoch fences it: a process that
    no longer runs the sink cannot write."""

    def load(self) -> tuple[Position, str] | None:
        """Returns what `save` has stored; None: nothing."""

    def save(self, position: Position, state: str) -> None:
        """Stores a position and a text durably, together. Raises LeaseLost: another process runs the sink."""


@dataclass(frozen=True, slots=True)
class SinkContext:
    """What a center gives a sink.

    Attributes:
        name: name of the sink. Two sinks may write to one system: the name distinguishes their positions.
        epoch: grows whenever another process takes the sink over. A system that can compare numbers refuses writes of
            an earlier epoch.
        memory: stores a state at the center; None: there is none, for example while a definition is only checked.
        now_ms: returns the wall time.
    """

    name: str
    epoch: int = 0
    memory: SinkMemory | None = None
    now_ms: Callable[[], int] = lambda: 0


class SinkKind(Protocol):
    """A kind of sinks.

    Attributes:
        name: the value of ``kind`` in the definition of a sink.
        config: the model of its options.

    A kind may have the attributes ``begin``, ``min_phase`` and ``batch_ms``: the defaults of these keys of its sinks.
    No sink of the kind gets answers of an earlier phase than ``min_phase``. Its options may have an attribute
    ``reads``: the names of the queries that the sink needs, which are the default of the key ``queries``.
    """

    name: str
    config: type[BaseModel]

    def sink(self, options: Any, context: SinkContext) -> Sink:
        """Builds a sink; connects to nothing.

        Args:
            options: an instance of `config`.

        Raises:
            InvalidConfig: an option cannot be used.
        """


class SinkPluginWarning(UserWarning):
    """An entry point of `edgewater.sinks` cannot be used. Definitions that name its kind are refused."""


class SinkKinds(PluginLoader):
    """The kinds of sinks that are installed."""

    group = GROUP
    provides = "sinks"
    warning = SinkPluginWarning

    def __init__(self, find: Callable[[], Iterable[EntryPoint]] | None = None) -> None:
        super().__init__(find)
        self._kinds: dict[str, SinkKind] = {}

    def get(self, name: str) -> SinkKind | None:
        """Returns the kind of this name; None: no package provides it. Loads all packages at the first call."""
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

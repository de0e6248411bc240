"""Kinds of sources that packages provide through the entry-point group `edgewater.sources`.

An entry point names a `SourceKind`. The kind's name is the key of the source in ``edge.yaml``, as ``file``, ``stdin``
and ``http`` are. An edge loads the packages only if its configuration has such a key.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel

from edge.codecs.schema import RecordSchema
from edge.receivers import Receiver
from edge.records import CoalesceTime, Decoded, Source, UnrepeatableSource, shortest_wait
from edge.utilization import ActivityMarker, no_marker
from edgewater.base.errors import InvalidConfig, installation
from edgewater.base.plugins import KindLoader

GROUP = "edgewater.sources"
BUILT_IN = ("file", "stdin", "http")


class SourcePluginWarning(UserWarning):
    """An entry point of `edgewater.sources` cannot be used. Configurations that name its kind are refused."""


@dataclass(frozen=True, slots=True)
class SourceContext:
    """The objects that an edge passes to the sources of a kind.

    Attributes:
        stream: name of the stream.
        schema: columns and event time of the records that the sources return.
        now_ms: returns the wall time.
        sleep: sleeps for a number of seconds. A source that polls for input calls it within `idle`.
        idle: takes the name of a source. Returns a context manager. Within it, the source has nothing to read and waits
            until input comes.
        coalesce_s: returns how long the next records of a source may wait, so that they are processed together. A
            source calls it again for each batch, in the event loop.
    """

    stream: str
    schema: RecordSchema
    now_ms: Callable[[], int]
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    idle: ActivityMarker = no_marker
    coalesce_s: CoalesceTime = shortest_wait

    async def wait(self, source: str, seconds: float) -> None:
        """Sleeps, and marks a source as idle meanwhile."""
        with self.idle(source):
            await self.sleep(seconds)


class SourceFailed(OSError):
    """The system of a source cannot be reached, or refuses it, at the moment.

    Attributes:
        fault: names the option that may be wrong, its value, and the reason.
    """

    def __init__(self, fault: InvalidConfig) -> None:
        super().__init__(f"{fault.field} {fault.value}: {fault.reason}")
        self.fault = fault


def require_module(module: str, package: str, extra: str) -> None:
    """Raises InvalidConfig if the package with a module is not installed. `extra` is the extra that installs it."""
    try:
        import_module(module)
    except ImportError as exc:
        raise InvalidConfig("", package, f"the package {package}: {installation(extra)}", str(exc)) from exc


Item = TypeVar("Item")
LOOK_S = 2.0  # limit: how late the end of a source is noticed
"""`next_item` calls `is_empty` again after this time, in seconds."""


async def next_item(
    context: SourceContext, source: str, items: asyncio.Queue[Item], is_empty: Callable[[], bool] = lambda: True
) -> Item:
    """Returns the next item of a queue that another thread fills. Marks the source as idle while it waits.

    Args:
        is_empty: returns whether the system of the source has no more records. Called if `items` is empty.
    """
    while items.empty():
        with context.idle(source) if is_empty() else contextlib.nullcontext(), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                return await items.get()
    return items.get_nowait()


class KeptSource(UnrepeatableSource):
    """A base of sources whose records the journal stores (`Chunk.keep`), so that a restart reads no record again."""

    gone = "its records are not read again; they are in the journal"

    def opened_before(self, names: Iterable[str]) -> tuple[Source, ...]:
        """Returns the sources that this source has opened in earlier runs of the agent (`Chunk.opens`).

        It is called when the agent starts, so that the watermark waits for these sources from the beginning.

        Args:
            names: names of all sources of the stream in earlier runs.
        """
        return ()


@dataclass(frozen=True, slots=True)
class SourceCheck:
    """The findings of `edgewater edge check` about one entry of ``sources``.

    Attributes:
        facts: one line each, such as the offsets of a partition.
        samples: decoded records. The records of one sample are in the order of delivery.
        nbytes: bytes of the sampled input.
        problems: faults that stop the source.
        advice: likely mistakes that do not stop the source.
    """

    facts: tuple[str, ...] = ()
    samples: tuple[Decoded, ...] = ()
    nbytes: int = 0
    problems: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()


class SourceKind(Protocol):
    """A kind of sources.

    A kind may have the method ``check(options, context, records) -> SourceCheck``. `edgewater edge check` calls it in a
    thread without an event loop. The method connects to the system with a deadline of a few seconds, reads up to
    `records` records, and changes nothing there. It raises InvalidConfig if an option cannot be right. The error's
    field is the path below the kind's key, such as ``topic``.

    Attributes:
        name: the key in ``edge.yaml``: lower case, up to 63 letters, digits and underscores.
        config: the model of the options below the key. `edge.config.TextConfig` is a base with formats of lines.

    >>> class CounterConfig(BaseModel, extra="forbid"):
    ...     last: int
    >>> class CounterSource(KeptSource):
    ...     def __init__(self, name, last):
    ...         self.name, self.last = name, last  # `chunks` would yield the numbers up to `last`
    >>> class Counter:
    ...     name = "counter"  # in edge.yaml: counter: {last: 9}
    ...     config = CounterConfig
    ...     def sources(self, options, context):
    ...         return [CounterSource(f"{context.stream}:counter:{options.last}", options.last)]
    >>> context = SourceContext("numbers", schema=None, now_ms=lambda: 0)
    >>> [source.name for source in Counter().sources(CounterConfig(last=9), context)]
    ['numbers:counter:9']
    """

    name: str
    config: type[BaseModel]

    def sources(self, options: Any, context: SourceContext) -> Sequence[Source]:
        """Builds the sources of one entry of ``sources``, without connecting to anything.

        It is called several times, also for sources that only read earlier records again. The name of each source
        begins with ``{stream}:{kind}:`` and depends only on the options, because positions are stored under the name.

        Args:
            options: an instance of `config`.

        Raises:
            InvalidConfig: the options do not fit the stream. Its field is the path below the kind's key.
        """


ReceiverFactory = Callable[[Sequence[tuple[Any, SourceContext]]], Sequence[Receiver]]
"""The optional method `receivers` of a `SourceKind`, for a kind whose records arrive in requests.

It is called once, with the options and the context of all entries of ``sources`` in all streams, because one path may
feed several streams. The sources of such a kind are `PushedSource` instances, with the same names as in
`SourceKind.sources`.
"""


class SourceKinds(KindLoader[SourceKind]):
    """The kinds of sources that are installed."""

    group = GROUP
    provides = "sources"
    warning = SourcePluginWarning
    method = "sources"
    example = "kafka"
    reserved = BUILT_IN

    def receivers(self, name: str) -> ReceiverFactory | None:
        """Returns the function that builds the receivers of a kind; None if the kind has no receivers."""
        return getattr(self.get(name), "receivers", None)


KINDS = SourceKinds()

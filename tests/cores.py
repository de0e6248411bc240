"""An edge's core in tests: opened with its queries, and asked for what it has to send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from edge.core.core import EdgeCore
from edge.core.events import Configured, Effect, Event, FrameBuilt, PullEvent, SourcesOpened
from edge.core.streams import StreamSpec
from edgewater.model.query import QuerySpec
from edgewater.wire import Frame, QueryRef

ROOM = PullEvent(1 << 20)
"""A link with room for all that a core of a test has to send."""


class Handles(Protocol):
    """A core, durable or not."""

    def handle(self, event: Event, /) -> Sequence[Effect]: ...


def open_core(
    spec: StreamSpec, *queries: tuple[QueryRef, QuerySpec], stream: str = "s", source: str = "file", number: int = 0
) -> EdgeCore:
    """Returns a core of one stream, which has one source. `number` is the core's own, in its frames."""
    core = EdgeCore({stream: spec}, number)
    core.handle(SourcesOpened(((stream, source),)))
    if queries:
        core.handle(Configured(queries))
    return core


def pulled(core: Handles, pull: PullEvent = ROOM) -> list[Frame]:
    """Returns the frames of one pull."""
    return [effect.frame for effect in core.handle(pull) if isinstance(effect, FrameBuilt)]


def drained(core: Handles, pull: PullEvent = ROOM) -> list[Frame]:
    """Pulls until nothing comes. Returns all frames."""
    frames: list[Frame] = []
    while built := pulled(core, pull):
        frames += built
    return frames

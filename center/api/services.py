"""`Services`: the objects that every endpoint uses, created once per process by `create_app`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from anyio import CapacityLimiter
from fastapi import Depends, Request

from center.api.answer_cache import AnswerRenderer
from center.api.audit import AuditLog
from center.api.authentication import Authenticator
from center.api.edge_progress import SharedProgress
from center.api.lanes import CostlyLane
from center.api.limits import Rates, ReadTurns, Slots
from center.api.live_feed import LiveFeed
from center.api.metrics import ApiMetrics
from center.api.problems import Outage
from center.api.sql_guard import SqlGuard
from center.catalog import Catalog, ComponentRegistry
from center.config import ApiLimitsSection
from center.results import ResultStore
from center.serving.byte_cache import ByteCache
from center.serving.synopsis_cache import SynopsisCache
from center.sinks import SinkStore
from edgewater.runtime.tasks import Tasks


@dataclass(frozen=True, slots=True)
class Services:
    """The stores and the process's caches. The stores block, so endpoints that use them are plain functions.

    Attributes:
        now_ms: wall clock.
        parsing: limits the reading of registrations and definitions to one at a time.
        registering: the threads of registrations.
        costly: the threads of requests that may cost much.
        draw_seed: draws the seed of a new query, a number from 0 to 2^64 - 1.
        sink_secrets: the setting `sink.secrets`.
        tasks: the tasks of the API. The process sets how it ends if one of them fails.
    """

    catalog: Catalog
    results: ResultStore
    components: ComponentRegistry
    now_ms: Callable[[], int]
    renderer: AnswerRenderer
    progress: SharedProgress
    feed: LiveFeed
    metrics: ApiMetrics
    synopses: SynopsisCache
    samples: ByteCache
    parsing: CapacityLimiter
    registering: CapacityLimiter
    costly: CostlyLane
    authenticator: Authenticator
    rates: Rates
    live_slots: Slots
    turns: ReadTurns
    limits: ApiLimitsSection
    audit: AuditLog
    draw_seed: Callable[[], int]
    sql: SqlGuard
    sinks: SinkStore
    tasks: Tasks
    outage: Outage
    sink_secrets: frozenset[str] = frozenset()


def _services(request: Request) -> Services:
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


Center = Annotated[Services, Depends(_services)]

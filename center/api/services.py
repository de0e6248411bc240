"""`Services`: the objects that every endpoint uses, created once per process by `create_app`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

from anyio import CapacityLimiter
from fastapi import Depends, Request

from center.api.answer_cache import AnswerRenderer
from center.api.audit import AuditLog
from center.api.authentication import Authenticator
from center.api.edge_progress import SharedProgress
from center.api.lanes import CostlyLane
from center.api.limits import Rates, ReadTurns, Slots
from center.api.live_feed import AnswerPoller, LiveFeed
from center.api.metrics import ApiMetrics, CenterCollector
from center.api.problems import Outage
from center.api.prometheus.series import samples_cache
from center.api.sql_guard import SqlGuard
from center.catalog import Catalog, ComponentRegistry
from center.config import ApiSection
from center.results import ResultStore
from center.serving.answer_tables import answer_schema
from center.serving.synopsis_cache import SynopsisCache
from center.sinks import SinkStore
from center.storage.wake import Channel
from edgewater.runtime.tasks import Tasks

COSTLY_AT_ONCE = 4  # limit: threads of costly requests
"""The largest number of costly requests in work at the same time. Other requests have other threads."""
REGISTRATIONS_AT_ONCE = 4  # limit: threads of registrations
"""Registrations have threads of their own, so that no number of reads keeps them waiting."""


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

    def __init__(
        self,
        catalog: Catalog,
        results: ResultStore,
        components: ComponentRegistry,
        config: ApiSection,
        now_ms: Callable[[], int],
        monotonic: Callable[[], float],
        draw_seed: Callable[[], int],
        sink_secrets: frozenset[str],
        wakes: Channel | None,
    ) -> None:
        self.catalog, self.results, self.components = catalog, results, components
        self.now_ms, self.draw_seed, self.sink_secrets = now_ms, draw_seed, sink_secrets
        self.limits, self.metrics, self.tasks = config.limits, ApiMetrics(), Tasks()
        refused = self.metrics.on_refused
        self.audit = AuditLog(config.audit, now_ms, self.metrics.audit_failures.inc, required=config.audit_required)
        self.renderer = AnswerRenderer(config.cache_bytes, self.metrics.on_lookup, partial(answer_schema, catalog))
        self.progress = SharedProgress(catalog, now_ms)
        changes = AnswerPoller(results.newest_answers, self.tasks, wakes)
        self.feed = LiveFeed(results, self.progress, self.renderer, changes, config.progress_ms / 1000, monotonic)
        self.synopses, self.samples = SynopsisCache(config.cache_bytes), samples_cache()
        self.parsing, self.registering = CapacityLimiter(1), CapacityLimiter(REGISTRATIONS_AT_ONCE)
        self.costly, self.sql = CostlyLane(COSTLY_AT_ONCE), SqlGuard()
        self.authenticator = Authenticator(config, now_ms)
        self.rates = Rates(self.limits, refused)
        self.live_slots = Slots(self.limits.live, self.limits.live_per_principal, refused)
        self.turns = ReadTurns(self.limits.reads_at_once, refused)
        self.sinks, self.outage = SinkStore(results.engine), Outage()
        self.metrics.registry.register(CenterCollector(components, results, self.progress, now_ms))
        self.metrics.registry.register(self.tasks.failures)


def _services(request: Request) -> Services:
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


Center = Annotated[Services, Depends(_services)]

"""The server of the API: uvicorn with limited connections, and certificates that are read again when they change."""

from __future__ import annotations

import asyncio
import logging
import ssl
import sys
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from center.config import ApiSection, ApiTlsSection, load_certificate
from edgewater.base.errors import InvalidConfig
from edgewater.runtime.configuration import FileWatch
from edgewater.runtime.connections import ConnectionLimits, GuardedServer, guarded
from edgewater.runtime.tasks import Tasks

GRACE_S = 5  # limit: time of a stop
"""How long open requests may take when the API is told to stop."""
DRAIN_S = 2.0  # limit: time of a stop
"""How long active clients may take to leave before idle connections are closed."""
RELOAD_S = 10.0  # limit: how long an old certificate is used
SWITCH_S = 0.0005  # limit: how long a thread keeps the interpreter
"""A thread that computes gives the interpreter to another thread after this time. A short request changes threads
several times, and each time waits for a costly one."""

log = logging.getLogger(__name__)


def server_config(app: ASGIApp, config: ApiSection, on_closed: Callable[[str], None]) -> uvicorn.Config:
    """Returns the configuration of the API's server. Raises InvalidConfig if a certificate or key cannot be used."""
    context = None if config.tls is None else _context(config.tls)
    limits = config.limits
    connections = ConnectionLimits(limits.connections, limits.headers_ms / 1000, limits.body_ms / 1000)
    return uvicorn.Config(
        app,
        timeout_graceful_shutdown=GRACE_S,
        **guarded(connections, on_closed),
        ssl_context_factory=None if context is None else lambda config, default: context,
    )


def _context(tls: ApiTlsSection) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, tls.cert, tls.key, "api.tls.cert")
    return context


class ApiServer(GuardedServer):
    """A server whose certificates are read again when they change.

    Args:
        on_stop: as of `GuardedServer`.
        tasks: the tasks of the process.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        api: ApiSection,
        on_stop: Callable[[], None],
        reload_s: float = RELOAD_S,
        tasks: Tasks | None = None,
    ) -> None:
        super().__init__(config, on_stop, DRAIN_S)
        self._tasks = tasks or Tasks()
        self._api = api
        self._reload_s = reload_s

    async def main_loop(self) -> None:
        sys.setswitchinterval(SWITCH_S)
        if self._api.tls is None:
            await super().main_loop()
            return
        watching = self._tasks.start("certificate", self._watch_certificate(self._api.tls))
        try:
            await super().main_loop()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch_certificate(self, tls: ApiTlsSection) -> None:
        """Lets handshakes use a changed certificate, until cancelled."""
        context = self.config.ssl
        assert context is not None
        watch = FileWatch(tls.cert, tls.key)

        def load() -> ssl.SSLContext:
            _context(tls)  # half a renewal must not replace a pair that fits
            load_certificate(context, tls.cert, tls.key, "api.tls.cert")
            return context

        while True:
            await asyncio.sleep(self._reload_s)
            try:
                if await asyncio.to_thread(watch.read, load) is not None:
                    log.info("%s has been read again", tls.cert)
            except InvalidConfig as exc:
                log.error("the changed certificate cannot be used, and the previous one stays in use: %s", exc.message)

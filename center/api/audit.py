"""The audit log: every change and every refused access as a line of JSON, written before the response is sent.

If `required` is set, a change also has a line before it is made, and is refused if that line cannot be written.

A line never contains a secret: neither headers, nor parameters, nor bodies are in it. Refused accesses are limited to
`REFUSED_PER_MINUTE` lines, so that nobody fills the disk. The next line states how many lines were omitted.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import threading
import uuid
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, Literal

from anyio.to_thread import run_sync
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Scope

from center.api.responses import OnStart, ResponseMiddleware
from edgewater.base.errors import InvalidConfig, StorageError
from edgewater.base.timestamps import rfc3339
from edgewater.model.json_types import Document

REFUSED = (401, 403, 421, 429)  # format: of HTTP
REFUSED_PER_MINUTE = 60  # limit: size of the audit log
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

log = logging.getLogger(__name__)


class AuditLog:
    """Appends lines to a file that only its owner may read, or to the process' log.

    The file is opened for each line, so that it may be renamed at any time to rotate it. A symbolic link is refused:
    whoever may write to the directory could make the center append to any file.

    Args:
        required: `begin` refuses changes while the log cannot be written.

    Raises:
        InvalidConfig: the file cannot be written.
    """

    def __init__(
        self,
        target: Path | Literal["log"],
        now_ms: Callable[[], int],
        on_failed: Callable[[], None],
        *,
        required: bool = False,
    ) -> None:
        self._path = None if target == "log" else Path(target)
        self._required = required
        self._now_ms = now_ms
        self._on_failed = on_failed
        self._lock = threading.Lock()
        self._minute, self._refused, self._left_out = 0, 0, 0
        try:
            self._append("")
        except OSError as exc:
            accepted = "a file that can be written, not a symbolic link"
            raise InvalidConfig("api.audit", str(target), accepted, exc.strerror or str(exc)) from exc

    def begin(self, entry: Document) -> None:
        """Writes a line of a change that is about to be made, if the log is required; blocks.

        Raises:
            StorageError: the line cannot be written, so that the change must not be made.
        """
        if not self._required:
            return
        with self._lock:
            try:
                self._append(_line({"time": rfc3339(self._now_ms()), **entry, "outcome": "begun"}))
            except OSError as exc:
                self._on_failed()
                raise StorageError(f"the audit log cannot be written, so no change is made: {exc.strerror}") from exc

    def write(self, entry: Document, *, is_refusal: bool) -> None:
        """Writes a line; blocks.

        A failure is logged and counted. It is not raised, because the event has happened already.
        """
        now_ms = self._now_ms()
        with self._lock:
            if is_refusal and not self._has_room(now_ms // 60_000):
                self._left_out += 1
                return
            left_out, self._left_out = self._left_out, 0
            line = {"time": rfc3339(now_ms), **entry, **({"left_out": left_out} if left_out else {})}
            try:
                self._append(_line(line))
            except OSError as exc:
                self._on_failed()
                log.error("the audit log cannot be written: %s", exc)

    def _has_room(self, minute: int) -> bool:
        if minute != self._minute:
            self._minute, self._refused = minute, 0
        self._refused += 1
        return self._refused <= REFUSED_PER_MINUTE

    def _append(self, text: str) -> None:
        if self._path is None:
            if text:
                log.info("%s", text.rstrip())
            return
        data = text.encode()
        # Not blocking: opening a named pipe that nobody reads would wait forever.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(self._path, flags, 0o600)
        try:
            if os.write(descriptor, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)


def _line(entry: Document) -> str:
    return json.dumps(entry) + "\n"


async def begin_change(request: Request, audit: AuditLog) -> None:
    """Records that a request of an identified principal is about to change something. Raises StorageError."""
    state = request.scope["state"]
    entry = _entry(request.scope, state, state.get("request_id"), None)
    await run_sync(audit.begin, entry)


class AuditMiddleware(ResponseMiddleware):
    """Middleware: gives each request an id, and writes the audit log.

    An endpoint sets in `request.state` the `principal`, whether the request `is_change`, the `target` if the path does
    not name it, and why it `refused` a request that it answers with 404.
    """

    def __init__(self, app: ASGIApp, audit: AuditLog) -> None:
        super().__init__(app)
        self._audit = audit

    def begin(self, scope: Scope) -> OnStart:
        """Implements `ResponseMiddleware.begin`."""
        header = Headers(scope=scope).get("x-request-id", "")
        request_id = header if REQUEST_ID.fullmatch(header) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id

        async def record(start: Message) -> None:
            MutableHeaders(scope=start)["X-Request-ID"] = request_id
            is_refusal = start["status"] in REFUSED or "refused" in state
            if is_refusal or state.get("is_change"):
                entry = _entry(scope, state, request_id, start["status"])
                await run_sync(lambda: self._audit.write(entry, is_refusal=is_refusal))

        return record


def _entry(scope: Scope, state: MutableMapping[str, Any], request_id: str | None, status: int | None) -> Document:
    endpoint, principal, client = scope.get("endpoint"), state.get("principal"), scope.get("client")
    refused = status in REFUSED or "refused" in state
    return {
        "principal": principal.name if principal is not None else None,
        "remote": client[0] if client else None,
        "action": getattr(endpoint, "__name__", None) or scope["method"],
        "target": state.get("target") or scope["path"][:200],
        "outcome": "refused" if refused else "done" if status is not None and status < 400 else "failed",
        "status": status,
        "request": request_id,
    }

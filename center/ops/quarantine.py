"""An operator's access to the frames and queries in quarantine: the job does not process them."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sqlalchemy import make_url

from center.api.audit import AuditLog
from center.api.models import QuarantinedFrame, SetAsideQuery, frame_json, set_aside_json
from center.catalog import Catalog
from center.config import CenterConfig
from center.results import ResultStore
from center.storage.frame_facts import read_facts
from center.storage.frame_log import FrameLog
from edgewater.base.errors import Conflict, InvalidConfig
from edgewater.runtime.clock import now_ms


class QuarantineDesk:
    """The quarantine of a center, whose processes may run. Use it as a context manager. All methods may raise
    StorageError.

    Changes are recorded in the API's audit log.

    Raises:
        InvalidConfig: there is no catalog. Opening the catalog would create it.
    """

    def __init__(self, config: CenterConfig) -> None:
        url = make_url(config.catalog_url)
        if url.get_backend_name() == "sqlite" and not Path(url.database or "").is_file():
            accepted = f"the directory of a center that has run, with {url.database}"
            raise InvalidConfig("data_dir", str(config.data_dir), accepted)
        self._audit = AuditLog(config.api.audit, now_ms, lambda: None, required=config.api.audit_required)
        self._catalog = Catalog(config.catalog_url)
        self._results_url, self._log_dir = config.results_url, config.log_dir

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._catalog.close()

    def frames(self) -> list[QuarantinedFrame]:
        """Returns the frames that could not be applied, the latest first."""
        return [frame_json(frame) for frame in self._catalog.quarantine.frames()]

    def queries(self) -> list[SetAsideQuery]:
        """Returns the queries that the job does not process."""
        return [set_aside_json(query) for query in self._catalog.quarantine.queries().values()]

    def retry_query(self, name: str) -> None:
        """Makes the job try a query again that it does not process.

        Raises:
            NotFound: the query is not in quarantine.
        """
        with self._audited("retry_query", f"/v1/queries/{name}"):
            self._catalog.quarantine.retry_query(name)

    def show(self, key: str, position: int) -> dict[str, Any]:
        """Returns a frame and its contents except for its partials.

        Raises:
            NotFound: the frame is not in quarantine.
        """
        frame = self._catalog.quarantine.frame(key, position)
        return {**frame_json(frame), "contents": _contents(frame.facts)}

    @contextlib.contextmanager
    def _audited(self, action: str, target: str) -> Iterator[None]:
        """Records a change by the user of this process, and the outcome of the change.

        Raises:
            StorageError: `AuditLog.begin` raised it.
        """
        entry = {"principal": f"cli:{_user()}", "remote": None, "action": action, "target": target[:200]}
        self._audit.begin({**entry, "status": None, "request": None})
        outcome = "failed"
        try:
            yield
            outcome = "done"
        finally:
            self._audit.write({**entry, "outcome": outcome, "status": None, "request": None}, is_refusal=False)

    def retry_frame(self, key: str, position: int) -> int:
        """Makes the job apply a frame as new data, and returns the frame's new position.

        Raises:
            NotFound: the frame is not in quarantine.
            Conflict: the frame's query is deleted, or the job has not passed the frame yet.
        """
        with self._audited("retry_frame", f"/v1/quarantine/{key}/{position}"):
            self._catalog.quarantine.frame(key, position)
            with contextlib.closing(ResultStore(self._results_url)) as store:
                if store.consumed().get(key, 0) < position:
                    raise Conflict(f"the job has not passed frame {position} of query {key} yet: try again when it has")
            return self._catalog.quarantine.retry_frame(key, position)

    def drop_frame(self, key: str, position: int) -> None:
        """Deletes a frame and its bytes.

        Raises:
            NotFound: the frame is not in quarantine.
        """
        with self._audited("drop_frame", f"/v1/quarantine/{key}/{position}"):
            segment = self._catalog.quarantine.drop_frame(key, position)
            if segment is not None:
                FrameLog(self._log_dir).remove(segment)
                self._catalog.frames.forget_segments([segment])


def _contents(facts: bytes) -> dict[str, int | None]:
    """Returns the contents of a frame except for its partials, as numbers."""
    body = read_facts(facts)
    return {
        "through_ms": body.through_ms,
        "since_ms": body.since_ms,
        "closes": len(body.closes),
        "closed_records": sum(close.observed for close in body.closes),
        "substreams": len(body.arrivals.substreams) if body.arrivals else 0,
        "losses": len(body.losses),
        "dropped_records": sum(drop.records for drop in body.dropped),
    }


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # in a container the user may have no name
        return str(os.getuid())

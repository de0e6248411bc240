"""`Pusher`: sends records to an edge at the times at which they are due."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import httpx
import numpy as np
import numpy.typing as npt

RETRY_S = 0.2  # limit: pushes while the edge starts, or cannot take records


class Pusher(threading.Thread):
    """Pushes records in NDJSON to one stream of an edge. All records that are due go into one request.

    Args:
        url: of the edge's stream.
        due_s: wall time at which each record is due, in s; ascending.
        lines: (first, end) -> the records from index `first` to before `end`, one line each.
        every_s: the least time between two requests.

    Attributes:
        failure: why the thread has ended early; None: it has not.
    """

    def __init__(
        self, url: str, due_s: npt.NDArray[np.float64], lines: Callable[[int, int], str], every_s: float
    ) -> None:
        super().__init__(daemon=True)
        self._url, self._due_s, self._lines, self._every_s = url, due_s, lines, every_s
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            with httpx.Client(headers={"content-type": "application/x-ndjson"}, timeout=60) as client:
                self._push(client)
        except Exception as exc:
            self.failure = exc

    def _push(self, client: httpx.Client) -> None:
        pushed = 0
        while pushed < len(self._due_s):
            now_s = time.time()  # noqa: TID251
            due_records = int(np.searchsorted(self._due_s, now_s))
            if due_records > pushed:
                try:
                    reply = client.post(self._url, content=self._lines(pushed, due_records))
                except httpx.ConnectError:
                    if pushed:
                        raise
                    reply = None  # the edge is still starting
                if reply is None or reply.status_code == 503:  # it has accepted nothing
                    time.sleep(RETRY_S)
                    continue
                reply.raise_for_status()
                pushed = due_records
            time.sleep(max(0.0, self._every_s - (time.time() - now_s)))  # noqa: TID251

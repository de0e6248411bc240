"""`Outbox` stores and delivers the notices that wait for one target.

Each attempt runs in a thread, so a target that does not reply delays no other target. A notice leaves the outbox when
the target has accepted the notice or refused it permanently. So a notice is delivered at least once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from tenacity import wait_random_exponential

from center.sinks.alert_targets import DeliveryFailed, Target

RESEND_MS = 60_000
MAX_WAITING = 1_000
MAX_WAITING_ALERTS = 20_000
"""The most notices, and the most alerts in notices, that wait for one target. If there are more, the oldest notice is
dropped and counted."""
AT_ONCE = 4
GRACE_S = 0.05
"""`AT_ONCE` is the most notices that a call of `step` delivers. `GRACE_S` is the longest wait for each notice, in
seconds."""
HANGS_MS = 15_000
"""The longest duration of an attempt in ms that is not reported as a problem."""
PAUSE = wait_random_exponential(multiplier=1, max=60)
"""Pauses between attempts, computed by tenacity."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Attempts:
    """The attributes of a retry state that tenacity's `wait_random_exponential` reads."""

    attempt_number: int


@dataclass(slots=True)
class Outbox:
    """The notices that wait for one target, with counters.

    Attributes:
        name: name of the sink and of the target, for the log.
        waiting: notices, the oldest first.
        delivered, refused: numbers of notices that the target has accepted, and of notices that it has refused
            permanently.
        dropped: number of notices that were dropped because too many waited.
        problem: why the last attempt failed; empty if it did not fail.
    """

    name: str
    target: Target
    waiting: list[Mapping[str, Any]] = field(default_factory=list)
    delivered: int = 0
    refused: int = 0
    dropped: int = 0
    problem: str = ""
    _attempt: Future[None] | None = None
    _notice: Mapping[str, Any] | None = None
    _began_ms: int = 0
    _tries: int = 0
    _next_ms: int = 0
    _resent_ms: int = 0

    @classmethod
    def restored(cls, name: str, target: Target, state: Mapping[str, Any]) -> Outbox:
        """Returns the outbox whose `to_json` returned `state`. For an empty mapping, returns a new outbox."""
        return cls(name, target, **{**state, "waiting": list(state.get("waiting", ()))})

    def to_json(self) -> dict[str, Any]:
        """Returns the state that must outlive the process."""
        return {
            "waiting": self.waiting,
            "delivered": self.delivered,
            "refused": self.refused,
            "dropped": self.dropped,
            "problem": self.problem,
        }

    def add(self, notice: Mapping[str, Any]) -> None:
        """Adds a notice after all other notices."""
        self.waiting.append(notice)
        while len(self.waiting) > MAX_WAITING or (
            len(self.waiting) > 1 and sum(len(n["alerts"]) for n in self.waiting) > MAX_WAITING_ALERTS
        ):
            self.dropped += 1
            log.warning("%s: notice %s is dropped, because too many notices wait", self.name, self.waiting.pop(0)["id"])

    def step(self, now_ms: int, firing: Callable[[], Sequence[Mapping[str, Any]]]) -> bool:
        """Delivers waiting notices, for a fraction of a second. If an attempt takes longer, it continues in its thread.

        Args:
            firing: returns the alerts that fire. It is called for targets to which firing alerts are sent repeatedly.

        Returns:
            Whether the result of `to_json` has changed.
        """
        before = self.delivered, self.refused, self.dropped, self.problem
        for _ in range(AT_ONCE):
            if self._attempt is None and not self._begin(now_ms, firing):
                break
            assert self._attempt is not None
            wait([self._attempt], GRACE_S if self._began_ms == now_ms else 0)
            if not self._attempt.done():
                if now_ms - self._began_ms >= HANGS_MS:
                    self.problem = "no reply"
                break
            self._end(now_ms)
        return before != (self.delivered, self.refused, self.dropped, self.problem)

    def finish(self, now_ms: int, timeout_s: float) -> bool:
        """Waits for the current attempt and begins no other attempt. Returns whether the result of `to_json` may have
        changed.
        """
        if self._attempt is None:
            return False
        wait([self._attempt], timeout_s)
        if is_done := self._attempt.done():
            self._end(now_ms)
        return is_done

    def _begin(self, now_ms: int, firing: Callable[[], Sequence[Mapping[str, Any]]]) -> bool:
        """Begins an attempt. Returns whether there was a notice, or firing alerts, to deliver."""
        if self._began_ms <= now_ms < self._next_ms:  # the wall clock may have stepped back
            return False
        self._notice = notice = self.waiting[0] if self.waiting else None
        if notice is not None:
            self._attempt = _in_thread(self.name, lambda: self.target.deliver(notice, now_ms))
        else:
            if not self.target.repeats or abs(now_ms - self._resent_ms) < RESEND_MS:
                return False
            self._resent_ms = now_ms
            if not (alerts := firing()):
                return False
            self._attempt = _in_thread(self.name, lambda: self.target.resend(alerts, now_ms))
        self._began_ms = now_ms
        return True

    def _end(self, now_ms: int) -> None:
        assert self._attempt is not None
        failure, self._attempt = self._attempt.exception(), None
        is_final = isinstance(failure, DeliveryFailed) and failure.is_final
        if self._notice is not None and (failure is None or is_final) and self.waiting[:1] == [self._notice]:
            self.waiting.pop(0)
        if failure is None:
            self.problem, self._tries, self._next_ms = "", 0, 0
            self.delivered += self._notice is not None
            return
        # Other exceptions may quote a secret, such as a header that is not ASCII.
        reason = failure.message if isinstance(failure, DeliveryFailed) else type(failure).__name__
        if reason != self.problem:
            log.warning("%s: %s", self.name, reason)
        self.problem = reason
        if is_final and self._notice is not None:
            self.refused, self._tries = self.refused + 1, 0
            log.warning("%s: the target refuses notice %s permanently", self.name, self._notice["id"])
            return
        self._tries += 1
        self._next_ms = now_ms + int(1000 * PAUSE(_Attempts(self._tries)))  # type: ignore[arg-type]


def _in_thread(name: str, call: Callable[[], None]) -> Future[None]:
    """Runs a call in a daemon thread, because the process may end before the call ends."""
    result: Future[None] = Future()

    def run() -> None:
        try:
            call()
        except BaseException as exc:
            result.set_exception(exc)
        else:
            result.set_result(None)

    threading.Thread(target=run, name=f"deliver-{name}", daemon=True).start()
    return result

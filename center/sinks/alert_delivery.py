"""`Outbox` stores and delivers the notices that wait for one target.

Each attempt runs in a thread, so a target that does not reply delays no other target. A notice leaves the outbox when
the target has accepted the notice, so a notice is delivered at least once. If the target refuses a notice permanently,
each of its alerts is tried alone: the refused start of an alert is given up, and the refused end is repeated.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, cast

from tenacity import wait_random_exponential
from typing_extensions import TypedDict

from center.sinks.alert_targets import DeliveryFailed, Notice, StatedAlert, Target

REPEAT_MS = 60_000  # limit: notices to a target
"""The time in ms between two repetitions of firing alerts, and of the ends of alerts that the target has refused."""
MAX_WAITING = 1_000  # limit: memory of notices that wait
MAX_WAITING_ALERTS = 20_000
"""The most notices, and the most alerts in notices, that wait for one target. If there are more, starts of alerts are
dropped and counted, the oldest first. The end of an alert whose start was delivered is never dropped."""
AT_ONCE = 4  # limit: time of a step
GRACE_S = 0.05
"""`AT_ONCE` is the most notices that a call of `step` delivers. `GRACE_S` is the longest wait for each notice, in
seconds."""
HANGS_MS = 15_000  # limit: how late a target that hangs is stated
"""The longest duration of an attempt in ms that is not reported as a problem."""
PAUSE = wait_random_exponential(multiplier=1, max=60)
"""Pauses between attempts, computed by tenacity."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Attempts:
    """The attributes of a retry state that tenacity's `wait_random_exponential` reads."""

    attempt_number: int


class OutboxState(TypedDict, total=False):
    """The part of an outbox that must outlive the process: attributes of `Outbox`, as JSON."""

    waiting: list[Notice]
    ends: list[Notice]
    untold: list[str]
    delivered: int
    refused: int
    dropped: int
    problem: str
    refusal: str


@dataclass(slots=True)
class Outbox:
    """The notices that wait for one target, with counters. Times of arguments are of a monotonic clock.

    Attributes:
        name: name of the sink and of the target, for the log.
        waiting: notices, the oldest first.
        ends: notices with one end of an alert each, which the target has refused.
        untold: keys of alerts whose starts were dropped or refused. The target gets no ends of these alerts.
        delivered, refused: numbers of notices that the target has accepted, and of notices that it has refused
            permanently.
        dropped: number of notices that lost alerts because too many waited.
        problem: why the last attempt failed; empty if it did not fail and no alert is refused.
        refusal: why the target has refused the last alert that it refused.
    """

    name: str
    target: Target
    waiting: list[Notice] = field(default_factory=list)
    ends: list[Notice] = field(default_factory=list)
    untold: set[str] = field(default_factory=set)
    delivered: int = 0
    refused: int = 0
    dropped: int = 0
    problem: str = ""
    refusal: str = ""
    _attempt: Future[None] | None = None
    _notice: Notice | None = None
    _repeated: list[Notice] = field(default_factory=list)
    _began_ms: int = 0
    _tries: int = 0
    _next_ms: int = 0
    _repeated_ms: int = -REPEAT_MS

    @classmethod
    def restored(cls, name: str, target: Target, state: OutboxState) -> Outbox:
        """Returns the outbox whose `to_state` returned `state`. For an empty mapping, returns a new outbox."""
        stored: dict[str, Any] = {key: value for key, value in state.items() if key in OutboxState.__annotations__}
        return cls(name, target, **{**stored, "untold": set(state.get("untold", ()))})

    def to_state(self) -> OutboxState:
        """Returns the state that must outlive the process."""
        own: Any = {key: getattr(self, key) for key in OutboxState.__annotations__}
        return cast(OutboxState, {**own, "untold": sorted(self.untold)})

    @property
    def left(self) -> int:
        """The number of notices that the target has not accepted."""
        return len(self.waiting) + len(self.ends)

    def add(self, notice: Notice) -> None:
        """Adds a notice after all other notices. Leaves out the end of an alert if the target never got its start."""
        alerts = []
        being_told = {alert_key(a) for a in self._notice["alerts"]} if self._notice and self._attempt else set()
        for alert in notice["alerts"]:
            key = alert_key(alert)
            if alert["status"] == "firing" or key not in self.untold or key in being_told:
                alerts.append(alert)
            self.untold.discard(key)
        if not alerts:
            return
        # Later, the target must not get an earlier state of these alerts.
        keys = {alert_key(alert) for alert in alerts}
        self._repeated = _without(self._repeated, keys)
        self.ends = _without(self.ends, keys)
        self.waiting.append(with_alerts(notice, alerts))
        while len(self.waiting) > MAX_WAITING or sum(len(n["alerts"]) for n in self.waiting) > MAX_WAITING_ALERTS:
            # The first notice may have been delivered, although no reply has come.
            later = (
                at for at, n in enumerate(self.waiting) if at and any(a["status"] == "firing" for a in n["alerts"])
            )
            if (at := next(later, None)) is None:
                return
            self.dropped += 1
            log.warning("%s: notice %s is dropped, because too many notices wait", self.name, self.waiting[at]["id"])
            self._drop_starts(at)

    def step(self, now_ms: int, firing: Callable[[], Sequence[Notice]]) -> bool:
        """Delivers waiting notices, for a fraction of a second. If an attempt takes longer, it continues in its thread.

        Args:
            firing: returns notices with the alerts that fire. It is called for targets to which firing alerts are sent
                repeatedly.

        Returns:
            Whether the result of `to_state` has changed.
        """
        before = self._counted
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
        return before != self._counted

    @property
    def _counted(self) -> tuple[object, ...]:
        return self.delivered, self.refused, self.left, len(self.untold), self.problem

    def finish(self, now_ms: int, timeout_s: float) -> bool:
        """Waits for the current attempt and begins no other attempt. Returns whether the result of `to_state` may have
        changed.
        """
        if self._attempt is None:
            return False
        wait([self._attempt], timeout_s)
        if is_done := self._attempt.done():
            self._end(now_ms)
        return is_done

    def _begin(self, now_ms: int, firing: Callable[[], Sequence[Notice]]) -> bool:
        """Begins an attempt. Returns whether there was something to deliver."""
        if now_ms < self._next_ms:
            return False
        if not self.waiting and not self._repeated and now_ms - self._repeated_ms >= REPEAT_MS:
            self._repeated_ms = now_ms
            self._repeated = [*(firing() if self.target.repeats else ()), *self.ends]
        self._notice = notice = next(iter(self.waiting or self._repeated), None)
        if notice is None:
            return False
        self._attempt = _in_thread(self.name, lambda: self.target.deliver(notice))
        self._began_ms = now_ms
        return True

    def _end(self, now_ms: int) -> None:
        assert self._attempt is not None and self._notice is not None
        failure, self._attempt, notice = self._attempt.exception(), None, self._notice
        if failure is None:
            self._tries = self._next_ms = 0
            self._delivered(notice)
            self.problem = f"alerts are refused: {self.refusal}" if self.refusal and (self.ends or self.untold) else ""
            return
        # Other exceptions may quote a secret, such as a header that is not ASCII.
        reason = failure.message if isinstance(failure, DeliveryFailed) else type(failure).__name__
        if reason != self.problem:
            log.warning("%s: %s", self.name, reason)
        self.problem = reason
        if isinstance(failure, DeliveryFailed) and failure.is_final:
            self._tries = 0
            self._refused(notice, reason)
            return
        self._tries += 1
        self._next_ms = now_ms + int(1000 * PAUSE(_Attempts(self._tries)))  # type: ignore[arg-type]

    def _delivered(self, notice: Notice) -> None:
        self.untold -= {alert_key(alert) for alert in notice["alerts"] if alert["status"] == "firing"}
        if self.waiting[:1] == [notice]:
            self.waiting.pop(0)
            self.delivered += 1
            return
        self._repeated = [n for n in self._repeated if n["id"] != notice["id"]]
        left = [n for n in self.ends if n["id"] != notice["id"]]
        self.delivered += len(self.ends) - len(left)
        self.ends = left

    def _refused(self, notice: Notice, reason: str) -> None:
        """Splits a refused notice, because one alert of it may be the reason. Only the refused start of one alert is
        given up.
        """
        is_new, alerts = self.waiting[:1] == [notice], notice["alerts"]
        queue = self.waiting if is_new else self._repeated
        if len(alerts) > 1:
            # Meanwhile, `add` may have removed alerts from a repetition.
            queue[:] = [part for n in queue for part in (_halves(n) if n["id"] == notice["id"] else [n])]
            return
        if is_new:
            self.refused += 1
            log.warning("%s: the target refuses notice %s permanently", self.name, notice["id"])
        self.refusal = reason
        if is_new and alerts[0]["status"] == "firing":
            self._drop_starts(0)
            return
        queue[:] = [n for n in queue if n["id"] != notice["id"]]
        if alerts[0]["status"] == "resolved":
            labels = alerts[0]["labels"]
            if is_new and not any(a["labels"] == labels for n in self.waiting for a in n["alerts"]):
                self.ends.append(notice)

    def _drop_starts(self, at: int) -> None:
        """Drops the starts of alerts in a waiting notice, and the ends that belong to them in later notices."""
        kept, ends = self.waiting[:at], set[str]()
        for number, notice in enumerate(self.waiting[at:]):
            alerts = []
            for alert in notice["alerts"]:
                if number == 0 and alert["status"] == "firing":
                    ends.add(alert_key(alert))
                elif alert["status"] == "resolved" and alert_key(alert) in ends:
                    ends.discard(alert_key(alert))
                else:
                    alerts.append(alert)
            if alerts:
                kept.append(with_alerts(notice, alerts))
        self.waiting = kept
        self.untold |= ends


def alert_key(alert: StatedAlert) -> str:
    """Returns a text that is different for different alerts of a target."""
    return json.dumps(alert["labels"], sort_keys=True)


def with_alerts(notice: Notice, alerts: Sequence[StatedAlert], name: str | None = None) -> Notice:
    """Returns a notice with other alerts, and the title that fits them.

    Args:
        name: the id of the notice; None: the id stays.
    """
    firing = sum(alert["status"] == "firing" for alert in alerts)
    title = f"{notice['rule']}: {firing} firing, {len(alerts) - firing} resolved"
    summary = alerts[0]["annotations"].get("summary", "")
    named = title + (f" ({summary})" if summary else "")
    return {**notice, "id": notice["id"] if name is None else name, "title": named, "alerts": list(alerts)}


def _halves(notice: Notice) -> list[Notice]:
    alerts, half = notice["alerts"], len(notice["alerts"]) // 2
    parts = [part for part in (alerts[:half], alerts[half:]) if part]
    return [with_alerts(notice, part, f"{notice['id']}-{number}") for number, part in enumerate(parts)]


def _without(notices: Iterable[Notice], keys: Collection[str]) -> list[Notice]:
    """Returns the notices without some alerts. A notice without alerts is left out."""
    parts = [(n, [a for a in n["alerts"] if alert_key(a) not in keys]) for n in notices]
    return [n if len(left) == len(n["alerts"]) else with_alerts(n, left) for n, left in parts if left]


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

"""Targets of alerts: webhooks and Alertmanager. A delivery may be repeated, and each repetition has the same key.

No target has to have the clock of this machine. An Alertmanager compares the times of alerts with its own clock. So its
alerts begin and end at the time that its last reply states.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import ssl
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import httpx
from pydantic import (
    Field,
    JsonValue,
    PrivateAttr,
    SecretStr,
    ValidatorFunctionWrapHandler,
    model_validator,
    with_config,
)
from typing_extensions import TypedDict  # pydantic accepts this one in Python 3.11

from edgewater.base.errors import EdgewaterError
from edgewater.base.timestamps import rfc3339
from edgewater.model.json_types import Document
from edgewater.model.key_texts import with_label_names
from edgewater.runtime.configuration import ProxyUrl, Secret, Section, refusal
from edgewater.runtime.http_exchange import ExchangeFailed, Reply, post, way_of

TIMEOUT_S = 10.0  # limit: the wait for a target
"""Timeout of each step of an exchange with a target."""
ENDS_AFTER_MS = 300_000
"""Alertmanager resolves an alert by itself if it has not received the alert again within this time."""
REFUSING = frozenset({400, 413, 415, 422})
"""HTTP status codes of a server that will not accept the same request later."""


@with_config(use_attribute_docstrings=True)
class AlertState(TypedDict):
    """An alert as the API shows it."""

    status: Literal["firing", "pending", "resolved"]
    """`firing`, or `pending` until its condition has held for long enough."""
    rule: str
    query: str
    labels: dict[str, str]
    """`alertname`, `query`, the groups, and the labels of the rule."""
    annotations: dict[str, str]
    since: str
    """Start of the first window in which the condition held without interruption."""
    starts_at: str | None
    """When it began to fire."""
    details: Mapping[str, JsonValue]
    """What the last answer says: `condition` (`holds` or `unknown`), values with bounds, window, phase and revision."""


class StatedAlert(AlertState):
    """An alert in a notice."""

    ends_at: str | None


class Notice(TypedDict):
    """A notice of `AlertSink`, as JSON."""

    id: str
    sink: str
    rule: str
    query: str
    title: str
    at: str
    alerts: list[StatedAlert]


class DeliveryFailed(EdgewaterError):
    """A target has not accepted a notice. The message says why.

    Attributes:
        is_final: whether the target will never accept the notice.
    """

    code = "delivery-failed"

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


class ServerSection(Section):
    """A server that takes alerts."""

    ca: Path | None = None
    """Certificates (PEM) that sign the server's certificate. Unset: the certificates of the system."""
    proxy: ProxyUrl | None = None
    """An HTTP proxy on the way to the URL. Unset: no proxy."""


class WebhookSection(ServerSection):
    """A URL that takes alerts as JSON by POST."""

    url: Secret = Field()
    """``https://…``. The URL may contain a token, so it is treated as a secret."""
    key: Secret | None = None
    """Key of the signature in ``Edgewater-Signature: t=…,sha256=…``. The signature is the HMAC-SHA256 of the time, a
    dot and the body."""
    headers: dict[str, Secret] = {}
    """Further headers, such as ``Authorization``."""


class AlertmanagerSection(ServerSection):
    """An Alertmanager of Prometheus, by its API version 2."""

    url: str = Field(pattern=r"^https?://\S+$")
    """Such as ``http://127.0.0.1:9093``. If the Alertmanager's routes have a prefix, the URL contains the prefix."""
    token: Secret | None = None
    """A bearer token."""


class TargetSection(Section):
    """A target: one of `webhook` and `alertmanager`."""

    webhook: WebhookSection | None = None
    """A URL that takes alerts as JSON by POST."""
    alertmanager: AlertmanagerSection | None = None
    """An Alertmanager, which groups, silences and routes alerts."""
    _document: Any = PrivateAttr(default=None)

    @model_validator(mode="wrap")
    @classmethod
    def _with_document(cls, given: Any, validate: ValidatorFunctionWrapHandler) -> Self:
        section: Self = validate(given)
        section._document = given
        return section

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.webhook is None) == (self.alertmanager is None):
            raise refusal("exactly one of webhook and alertmanager")
        return self

    @property
    def document(self) -> Any:
        """The section as the user wrote it."""
        return self._document

    def make(self, now_ms: Callable[[], int]) -> Target:
        """Builds the target. Does not connect to it.

        Args:
            now_ms: returns the wall time, for signatures.
        """
        if self.webhook is not None:
            return Webhook(self.webhook, now_ms)
        assert self.alertmanager is not None
        return Alertmanager(self.alertmanager)


class Target(Protocol):
    """A system that notices are delivered to."""

    repeats: bool
    """Whether firing alerts are sent repeatedly."""

    def deliver(self, notice: Notice) -> None:
        """Delivers a notice. Blocks until the system has replied.

        Raises:
            DeliveryFailed: the delivery failed. Any other exception is treated like one that is not final.
        """


class Webhook:
    """Delivers notices to a URL; see `WebhookSection`."""

    repeats = False

    def __init__(self, section: WebhookSection, now_ms: Callable[[], int]) -> None:
        self._section, self._server = section, _Server(section)
        self._now_ms = now_ms

    def deliver(self, notice: Notice) -> None:
        """Implements `Target.deliver`."""
        body = json.dumps(notice, separators=(",", ":")).encode()
        headers = {name: value.get_secret_value() for name, value in self._section.headers.items()}
        headers |= {"Content-Type": "application/json", "Idempotency-Key": notice["id"]}
        if self._section.key is not None:
            headers["Edgewater-Signature"] = signature(self._section.key, self._now_ms() // 1000, body)
        self._server.post(self._section.url.get_secret_value(), body, headers)


def signature(key: SecretStr, time_s: int, body: bytes) -> str:
    """Returns the value of ``Edgewater-Signature``. A receiver can compute it from the key, the time and the body."""
    digest = hmac.new(key.get_secret_value().encode(), f"{time_s}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={time_s},sha256={digest}"


class Alertmanager:
    """Delivers alerts to an Alertmanager; see `AlertmanagerSection`."""

    repeats = True

    def __init__(self, section: AlertmanagerSection) -> None:
        self._section, self._server = section, _Server(section)

    def deliver(self, notice: Notice) -> None:
        """Implements `Target.deliver`. An Alertmanager resolves alerts that it has not received again within
        `ENDS_AFTER_MS`.
        """
        now_ms = _time_of(self._post([]))
        body: list[Document] = [
            {
                "labels": with_label_names(alert["labels"]),
                "annotations": with_label_names(
                    {"since": alert["since"], "fired_at": alert["starts_at"] or "", **alert["annotations"]}
                ),
                # An Alertmanager that has the alert keeps its earlier start.
                "startsAt": rfc3339(now_ms),
                "endsAt": rfc3339(now_ms + (ENDS_AFTER_MS if alert["status"] == "firing" else 0)),
            }
            for alert in notice["alerts"]
        ]
        self._post(body)

    def _post(self, alerts: Sequence[Document]) -> Reply:
        token = self._section.token
        headers = {"Content-Type": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token.get_secret_value()}"
        url = f"{self._section.url.rstrip('/')}/api/v2/alerts"
        if (reply := self._server.post(url, json.dumps(alerts).encode(), headers)).text.strip():
            raise DeliveryFailed(f"{reply}: no Alertmanager, whose reply has no body")
        return reply


def _time_of(reply: Reply) -> int:
    """Returns the wall time of a server in ms."""
    try:
        stated = parsedate_to_datetime(reply.date)
    except ValueError:
        raise DeliveryFailed(f"{reply.host}: the reply does not state its time (Date)") from None
    return int(stated.replace(tzinfo=stated.tzinfo or UTC).timestamp() * 1000)


class _Server:
    """Posts requests. The trusted certificates stay in memory, because reading them takes 30 ms."""

    def __init__(self, section: ServerSection) -> None:
        self._section = section
        self._context: ssl.SSLContext | None = None

    def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """Posts one request, and returns the reply, which confirms it.

        Raises:
            DeliveryFailed: the request failed. The message names the host but not the rest of the URL.
        """
        if self._context is None:
            self._context = _trusted(self._section.ca)
        try:
            with httpx.Client(verify=self._context, **way_of(self._section.proxy)) as client:
                reply = post(client, url, body, headers, TIMEOUT_S)
        except ExchangeFailed as exc:
            raise DeliveryFailed(str(exc)) from None
        if not reply.is_success:
            raise DeliveryFailed(str(reply), is_final=reply.status in REFUSING)
        return reply


def _trusted(ca: Path | None) -> ssl.SSLContext:
    """Returns a context that verifies servers.

    Raises:
        DeliveryFailed: the file of certificates cannot be read.
    """
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as exc:  # also ssl.SSLError
        raise DeliveryFailed(f"ca {ca}: {exc}") from exc

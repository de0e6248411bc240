"""Targets of alerts: webhooks, Alertmanager, email. A delivery may be repeated, and each repetition has the same
key.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import smtplib
import ssl
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.message import EmailMessage
from email.utils import format_datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self

import httpx
from pydantic import Field, SecretStr, model_validator

from edgewater.model.errors import EdgewaterError
from edgewater.model.timestamps import rfc3339
from edgewater.runtime.configuration import RemoteAddress, Secret, Section, refusal, split_address

TIMEOUT_S = 10.0
"""Timeout of each step of an exchange with a target."""
ENDS_AFTER_MS = 300_000
"""Alertmanager resolves an alert by itself if it has not received the alert again within this time."""


REFUSING = frozenset({400, 413, 415, 422})
"""HTTP status codes of a server that will not accept the same request later."""
ADDRESS = r"^[^\s@,<>]+@[^\s@,<>]+$"


class DeliveryFailed(EdgewaterError):
    """A target has not accepted a notice. The message says why.

    Attributes:
        is_final: whether the target will never accept the notice.
    """

    code = "delivery-failed"

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


class WebhookSection(Section):
    """A URL that takes alerts as JSON by POST."""

    url: Secret = Field()
    """``https://…``. The URL may contain a token, so it is treated as a secret."""
    key: Secret | None = None
    """Key of the signature in ``Edgewater-Signature: t=…,sha256=…``. The signature is the HMAC-SHA256 of the time, a
    dot and the body."""
    headers: dict[str, Secret] = {}
    """Further headers, such as ``Authorization``."""
    ca: Path | None = None
    """Certificates (PEM) that sign the server's certificate. Unset: the certificates of the system."""


class AlertmanagerSection(Section):
    """An Alertmanager of Prometheus, by its API version 2."""

    url: str = Field(pattern=r"^https?://\S+$")
    """Such as ``http://127.0.0.1:9093``. If the Alertmanager's routes have a prefix, the URL contains the prefix."""
    token: Secret | None = None
    """A bearer token."""
    ca: Path | None = None
    """Certificates (PEM) that sign the server's certificate. Unset: the certificates of the system."""


class EmailSection(Section):
    """A mail server."""

    server: RemoteAddress
    """``mail.example.com:587``."""
    sender: str = Field(pattern=ADDRESS)
    """The address of the sender."""
    to: list[Annotated[str, Field(pattern=ADDRESS)]] = Field(min_length=1)
    """The addresses of the receivers."""
    tls: Literal["starttls", "tls", "none"] = "starttls"
    """Encryption of the connection. With `none`, a password is sent without encryption."""
    username: str | None = None
    """Name of the login. Unset: no login."""
    password: Secret | None = None
    """Password of the login."""
    ca: Path | None = None
    """Certificates (PEM) that sign the server's certificate. Unset: the certificates of the system."""

    @model_validator(mode="after")
    def _login(self) -> Self:
        if (self.username is None) != (self.password is None):
            raise refusal("username and password, or neither")
        return self


class TargetSection(Section):
    """A target: one of `webhook`, `alertmanager` and `email`."""

    webhook: WebhookSection | None = None
    """A URL that takes alerts as JSON by POST."""
    alertmanager: AlertmanagerSection | None = None
    """An Alertmanager, which groups, silences and routes alerts."""
    email: EmailSection | None = None
    """A mail server. There is one mail per change of a rule."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(part is not None for part in (self.webhook, self.alertmanager, self.email)) != 1:
            raise refusal("exactly one of webhook, alertmanager and email")
        return self

    def make(self) -> Target:
        """Builds the target. Does not connect to it."""
        if self.webhook is not None:
            return Webhook(self.webhook)
        if self.alertmanager is not None:
            return Alertmanager(self.alertmanager)
        assert self.email is not None
        return Email(self.email)


class Target(Protocol):
    """Delivers notices. Each method blocks until the system has replied, and raises DeliveryFailed if the delivery
    failed.

    Any other exception of a method is treated like a DeliveryFailed that is not final.
    """

    repeats: bool
    """Whether firing alerts are sent repeatedly (`resend`)."""

    def deliver(self, notice: Mapping[str, Any], now_ms: int) -> None:
        """Delivers a notice of `AlertSink`."""

    def resend(self, alerts: Sequence[Mapping[str, Any]], now_ms: int) -> None:
        """Sends the alerts that fire."""


class Webhook:
    """Delivers notices to a URL; see `WebhookSection`."""

    repeats = False

    def __init__(self, section: WebhookSection) -> None:
        self._section, self._server = section, _Server(section.ca)

    def deliver(self, notice: Mapping[str, Any], now_ms: int) -> None:
        """Implements `Target.deliver`."""
        body = json.dumps(notice, separators=(",", ":")).encode()
        headers = {name: value.get_secret_value() for name, value in self._section.headers.items()}
        headers |= {"Content-Type": "application/json", "Idempotency-Key": str(notice["id"])}
        if self._section.key is not None:
            headers["Edgewater-Signature"] = signature(self._section.key, now_ms // 1000, body)
        self._server.post(self._section.url.get_secret_value(), body, headers)

    def resend(self, alerts: Sequence[Mapping[str, Any]], now_ms: int) -> None:
        """Implements `Target.resend`."""


def signature(key: SecretStr, time_s: int, body: bytes) -> str:
    """Returns the value of ``Edgewater-Signature``. A receiver can compute it from the key, the time and the body."""
    digest = hmac.new(key.get_secret_value().encode(), f"{time_s}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={time_s},sha256={digest}"


class Alertmanager:
    """Delivers alerts to an Alertmanager; see `AlertmanagerSection`."""

    repeats = True

    def __init__(self, section: AlertmanagerSection) -> None:
        self._section, self._server = section, _Server(section.ca)

    def deliver(self, notice: Mapping[str, Any], now_ms: int) -> None:
        """Implements `Target.deliver`."""
        self.resend(notice["alerts"], now_ms)

    def resend(self, alerts: Sequence[Mapping[str, Any]], now_ms: int) -> None:
        """Implements `Target.resend`. An Alertmanager resolves alerts that it has not received again within
        `ENDS_AFTER_MS`.
        """
        body = [
            {
                "labels": {label_name(name): value for name, value in alert["labels"].items()},
                "annotations": alert["annotations"],
                "startsAt": alert["starts_at"],
                "endsAt": alert["ends_at"] or rfc3339(now_ms + ENDS_AFTER_MS),
            }
            for alert in alerts
        ]
        token = self._section.token
        headers = {"Content-Type": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token.get_secret_value()}"
        url = f"{self._section.url.rstrip('/')}/api/v2/alerts"
        self._server.post(url, json.dumps(body).encode(), headers)


def label_name(name: str) -> str:
    """Returns a name that Prometheus accepts as the name of a label."""
    return re.sub(r"[^a-zA-Z0-9_]|^(?=[0-9])", "_", name)


class Email:
    """Sends notices as mails; see `EmailSection`."""

    repeats = False

    def __init__(self, section: EmailSection) -> None:
        self._section = section

    def deliver(self, notice: Mapping[str, Any], now_ms: int) -> None:
        """Implements `Target.deliver`."""
        section, message = self._section, EmailMessage()
        message["Subject"] = _one_line(notice["title"])
        message["From"], message["To"] = section.sender, ", ".join(section.to)
        message["Date"] = format_datetime(datetime.fromtimestamp(now_ms / 1000, UTC))
        message["Message-ID"] = f"<{notice['id']}@edgewater>"
        message.set_content("\n".join([notice["title"], "", *map(_paragraph, notice["alerts"])]))
        context = _trusted(section.ca)
        try:
            with self._connected(context) as server:
                if section.tls == "starttls":
                    server.starttls(context=context)
                if section.username is not None and section.password is not None:
                    server.login(section.username, section.password.get_secret_value())
                refused = server.send_message(message)
        except smtplib.SMTPDataError as exc:
            raise DeliveryFailed(f"{section.server}: {exc}", is_final=exc.smtp_code >= 500) from exc
        except (OSError, smtplib.SMTPException) as exc:
            raise DeliveryFailed(f"{section.server}: {exc}") from exc
        if refused:
            whom = ", ".join(f"{address} ({code} {reply!r})" for address, (code, reply) in refused.items())
            raise DeliveryFailed(f"{section.server}: refused for {whom}; all others have the mail", is_final=True)

    def _connected(self, context: ssl.SSLContext) -> smtplib.SMTP:
        host, port = split_address(self._section.server)
        if self._section.tls == "tls":
            return smtplib.SMTP_SSL(host, port, timeout=TIMEOUT_S, context=context)
        return smtplib.SMTP(host, port, timeout=TIMEOUT_S)

    def resend(self, alerts: Sequence[Mapping[str, Any]], now_ms: int) -> None:
        """Implements `Target.resend`."""


def _paragraph(alert: Mapping[str, Any]) -> str:
    labels = ", ".join(f"{name}={value}" for name, value in alert["labels"].items())
    notes = "".join(f"  {name}: {value}\n" for name, value in alert["annotations"].items())
    return f"{alert['status']}: {labels}\n{notes}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


class _Server:
    """Posts requests. The trusted certificates stay in memory, because reading them takes 30 ms."""

    def __init__(self, ca: Path | None) -> None:
        self._ca = ca
        self._context: ssl.SSLContext | None = None

    def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> None:
        """Posts one request.

        Raises:
            DeliveryFailed: the request failed. The message names the host but not the rest of the URL.
        """
        if self._context is None:
            self._context = _trusted(self._ca)
        host = "the URL"
        try:
            host = httpx.URL(url).host or host
            reply = httpx.post(url, content=body, headers=dict(headers), timeout=TIMEOUT_S, verify=self._context)
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise DeliveryFailed(f"{host}: {exc or type(exc).__name__}") from exc
        if reply.is_error or reply.is_redirect:
            reason = f"{host}: HTTP {reply.status_code} {reply.text[:200]}"
            raise DeliveryFailed(reason, is_final=reply.status_code in REFUSING)


def _trusted(ca: Path | None) -> ssl.SSLContext:
    """Returns a context that verifies servers.

    Raises:
        DeliveryFailed: the file of certificates cannot be read.
    """
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as exc:  # also ssl.SSLError
        raise DeliveryFailed(f"ca {ca}: {exc}") from exc

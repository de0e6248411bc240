"""The base of all sections of an edge's configuration, secrets and TLS."""

from __future__ import annotations

from pydantic import ConfigDict, model_validator

from edgewater.runtime.configuration import Section, refusal


class Model(Section):
    model_config = ConfigDict(strict=True)


class TlsConfig(Model):
    """PEM files of a connection. They are read at each connection."""

    ca: str | None = None
    """File of the CA that signed the server's certificate. None: the CAs of the system."""
    cert: str | None = None
    """This edge's certificate, for mutual TLS."""
    key: str | None = None
    """The key of `cert`."""

    @model_validator(mode="after")
    def _pair(self) -> TlsConfig:
        if (self.cert is None) != (self.key is None):
            raise refusal("cert and key together, or neither")
        return self


class HttpTlsConfig(Model):
    """PEM files of the HTTP server."""

    cert: str
    """The server's certificate."""
    key: str
    """The key of `cert`."""
    client_ca: str | None = None
    """File of the CA that signed the certificates of clients. None: clients need no certificate."""

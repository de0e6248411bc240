"""`Authenticator`: finds the principal of a bearer token. The token is static, or a JWT that the issuer has signed."""

from __future__ import annotations

import json
import logging
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

import jwt
from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from cachetools import LRUCache
from pydantic import SecretStr

from center.api_access import ANYONE, OidcSection, Principal, PrincipalEntry, read_principals_file
from center.config import ApiSection
from edgewater.base.errors import InvalidConfig, StorageError, Unauthenticated
from edgewater.base.timestamps import rfc3339
from edgewater.model.json_types import Document
from edgewater.runtime.bearer import bearer_token, token_digest
from edgewater.runtime.configuration import FileWatch

NO_END_MS = 1 << 62  # format: above all times
VERIFIED = 1024  # limit: memory of the cache
"""Maximum number of JWTs in the cache, whose signatures are not verified again."""
TRUSTED_MS = 60_000  # limit: how long a revoked JWT counts
"""How long a verified JWT is accepted before it is verified again, with the issuer's keys at that time."""
KEYS_S = 900.0  # limit: how long a withdrawn key counts
"""How long the issuer's keys are used before they are fetched again. A withdrawn key is then no longer used."""
FETCH_TIMEOUT_S = 3.0  # limit: the wait for an issuer
FETCH_PAUSE_S = 5.0  # limit: requests to an issuer that fails
"""Time between a failed fetch and the next fetch. With an unreachable issuer, not every request must wait for the
time-out."""
MAX_DOCUMENT_BYTES = 1 << 20  # limit: memory of an issuer's reply
MAX_SUBJECT = 255
"""Characters of a subject (OpenID Connect Core, section 2)."""
OIDC_PREFIX = "oidc:"
"""Names of principals of JWTs begin with this, and no other names. Limits and the audit log use names."""

log = logging.getLogger(__name__)


class Authenticator:
    """Checks the credentials of an API. Static tokens are stored and compared as digests: timing reveals nothing.

    Args:
        now_ms: wall clock, for the expiry of static tokens.

    Raises:
        InvalidConfig: the tokens' file cannot be used, or two principals share a token.

    Attributes:
        problem: why the changed tokens' file is not in use; None: it is in use.
    """

    def __init__(self, config: ApiSection, now_ms: Callable[[], int]) -> None:
        self._config = config
        self._now_ms = now_ms
        self._watch = FileWatch(config.tokens_file)
        self._static = self._read()
        self._jwts = _JwtVerifier(config.oidc) if config.oidc is not None else None
        self._verified: LRUCache[bytes, tuple[Principal, int]] = LRUCache(VERIFIED)
        self._verifying = CapacityLimiter(2)
        self.problem: str | None = None

    async def identify(self, authorization: str | None) -> Principal:
        """Returns the principal of an ``Authorization`` header.

        Raises:
            Unauthenticated: the token is missing, unknown or not valid now.
            StorageError: the issuer's keys cannot be fetched.
        """
        if not self._config.authenticates:
            return ANYONE
        token = bearer_token(authorization)
        if token is None:
            raise Unauthenticated(
                "a bearer token is required: Authorization: Bearer <token>; commands and the client read it from"
                " EDGEWATER_TOKEN, or from the file that EDGEWATER_TOKEN_FILE names"
            )
        digest, now_ms = token_digest(token), self._now_ms()
        entry = self._static.get(digest)
        if entry is not None:
            principal, end_ms = entry
            if now_ms >= end_ms:
                raise Unauthenticated(f"the token of {principal.name} was accepted until {rfc3339(end_ms)}")
            return principal
        if self._jwts is None or token.count(".") != 2:
            raise Unauthenticated("the bearer token belongs to no principal")
        remembered = self._verified.get(digest)
        if remembered is not None and now_ms < remembered[1]:
            return remembered[0]
        # In a worker, for RSA and for fetching the issuer's keys. At most two requests wait for the issuer; others wait
        # for these.
        principal, end_ms = await run_sync(self._jwts.verify, token, limiter=self._verifying)
        self._verified[digest] = principal, min(end_ms, now_ms + TRUSTED_MS)
        return principal

    def refresh(self) -> bool:
        """Reads the tokens' file if it has changed and is complete. If it cannot be used, nothing changes. Blocks."""
        before = self.problem
        try:
            static = self._watch.read(self._read, again=before is not None)
        except InvalidConfig as exc:
            self.problem = exc.message
            if self.problem == before:
                return False
            log.error("the changed credentials cannot be used, and the previous ones stay in use: %s", exc.message)
            return True
        if static is None:
            return False
        self._static, self.problem = static, None
        log.info("%s has been read again", self._config.tokens_file)
        return True

    def _read(self) -> dict[bytes, tuple[Principal, int]]:
        config = self._config
        entries: dict[str, PrincipalEntry] = dict(config.principals)
        if config.tokens_file is not None:
            entries |= read_principals_file(config.tokens_file)
        if config.token is not None and config.token.get_secret_value():
            entries["admin"] = PrincipalEntry(token=config.token, role="admin")
        static: dict[bytes, tuple[Principal, int]] = {}
        for name, entry in entries.items():
            if name.startswith(OIDC_PREFIX):
                raise InvalidConfig(f"api.principals.{name}", "…", f"a name that does not begin with {OIDC_PREFIX}")
            digest = _digest(entry)
            if digest in static:
                raise InvalidConfig(f"api.principals.{name}", "…", "a token that no other principal has")
            end_ms = NO_END_MS if entry.expires is None else entry.expires
            static[digest] = Principal(name, (entry.grant,)), end_ms
        return static


def _digest(entry: PrincipalEntry) -> bytes:
    if entry.sha256 is not None:
        return bytes.fromhex(entry.sha256)
    assert entry.token is not None
    return token_digest(entry.token.get_secret_value())


class _Keys(jwt.PyJWKClient):
    """The issuer's keys.

    The base class fetches an unknown key at most every 30 s. This class pauses after a failure.

    Args:
        locate: returns the keys' URL; may request it from the issuer.
    """

    def __init__(self, issuer: str, locate: Callable[[], str], proxy: SecretStr | None) -> None:
        super().__init__(issuer, lifespan=KEYS_S, timeout=FETCH_TIMEOUT_S)
        self._locate, self._proxy = locate, proxy
        self._failed_s = -FETCH_PAUSE_S

    def fetch_data(self) -> Any:
        if time.monotonic() - self._failed_s < FETCH_PAUSE_S:
            raise jwt.PyJWKClientConnectionError("the issuer could not be reached just now")
        try:
            self.uri = self._locate()
            # The base class would read a document of any size.
            keys = _document(self.uri, self._proxy)
            if not isinstance(keys, dict):
                raise jwt.PyJWKClientConnectionError(f"{self.uri} has no keys")
            if self.jwk_set_cache is not None:
                self.jwk_set_cache.put(keys)
            self._last_successful_fetch = time.monotonic()
            return keys
        except Exception:
            self._failed_s = time.monotonic()
            raise


def _document(url: str, proxy: SecretStr | None = None) -> Any:
    """Returns a JSON document of the issuer, of at most `MAX_DOCUMENT_BYTES`.

    Raises:
        OSError, PyJWKClientConnectionError: the document cannot be read, is too large, or takes too long.
        ValueError: it is not JSON.
    """
    ends_s, content = time.monotonic() + FETCH_TIMEOUT_S, b""
    way = {} if proxy is None else dict.fromkeys(("http", "https"), proxy.get_secret_value())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler(way))
    with opener.open(url, timeout=FETCH_TIMEOUT_S) as response:
        if url.startswith("https://") and not response.url.startswith("https://"):
            raise jwt.PyJWKClientConnectionError(f"{url} redirects to a URL without https")
        while part := response.read1(MAX_DOCUMENT_BYTES):
            content += part
            if len(content) > MAX_DOCUMENT_BYTES or time.monotonic() > ends_s:
                raise jwt.PyJWKClientConnectionError(f"{url} is too large or too slow")
    return json.loads(content)


class _JwtVerifier:
    """Verifies JWTs of one issuer. Thread-safe; blocks while it fetches the issuer's keys."""

    def __init__(self, config: OidcSection) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._jwks_url = config.jwks_url
        self._keys = _Keys(config.issuer, self._locate, config.proxy)

    def verify(self, token: str) -> tuple[Principal, int]:
        """Returns the principal, and the wall time in ms until which the result may be cached.

        Raises:
            Unauthenticated: the token is not of the issuer for this audience, not valid now, or grants nothing.
            StorageError: the issuer's keys cannot be fetched.
        """
        config = self._config
        try:
            kid = jwt.get_unverified_header(token).get("kid")
            if not isinstance(kid, str):
                raise Unauthenticated("the token names no key (kid)")
            claims = jwt.decode(
                token,
                self._keys.get_signing_key(kid),
                algorithms=list(config.algorithms),
                audience=config.audience,
                issuer=config.issuer,
                leeway=config.leeway / 1000,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except (jwt.PyJWKClientConnectionError, OSError) as exc:
            raise StorageError(f"the keys of {config.issuer} cannot be fetched") from exc
        except (jwt.PyJWTError, ValueError, RecursionError) as exc:
            raise Unauthenticated(f"the token is not accepted: {str(exc)[:200]}") from exc
        grants = tuple(config.roles[v] for v in _values(claims, config.claim) if v in config.roles)
        if not grants:
            raise Unauthenticated(f"no value of the token's claim {config.claim} has a role")
        subject = str(claims["sub"])
        if len(subject) > MAX_SUBJECT:
            raise Unauthenticated(f"the token's sub has {len(subject)} characters; expected at most {MAX_SUBJECT}")
        return Principal(OIDC_PREFIX + subject, grants), int(claims["exp"]) * 1000 + config.leeway

    def _locate(self) -> str:
        with self._lock:
            if self._jwks_url is None:
                url = f"{self._config.issuer.rstrip('/')}/.well-known/openid-configuration"
                document = _document(url, self._config.proxy)
                if document.get("issuer") != self._config.issuer:
                    raise jwt.PyJWKClientConnectionError(f"{url} is of another issuer")
                found = str(document["jwks_uri"])
                if self._config.issuer.startswith("https://") and not found.startswith("https://"):
                    raise jwt.PyJWKClientConnectionError(f"{url} names keys without https")
                self._jwks_url = found
            return self._jwks_url


def _values(claims: Document, path: str) -> list[str]:
    """Returns the values of a claim. It is a list, or a text of values with spaces between them."""
    value: Any = claims
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, str):
        return value.split()
    return [v for v in value if isinstance(v, str)] if isinstance(value, list) else []

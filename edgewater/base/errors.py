"""All errors that Edgewater raises.

    EdgewaterError
    ├── InvalidInput            a user's or a peer's input; names the field, the value and what is accepted
    │   ├── InvalidConfig       a configuration file or flag
    │   ├── InvalidQuery        a query specification
    │   ├── InvalidRecord       a record, or a batch of them
    │   └── InvalidRequest      an API request, or a question to a synopsis
    ├── SynopsisError
    │   ├── CorruptSynopsis     bytes that are damaged, or not a synopsis
    │   ├── UnsupportedVersion  bytes of a newer format
    │   └── IncompatibleSynopses  different kinds, parameters or seeds
    ├── ProtocolError           a peer violates `proto/edgewater/v1`
    │   ├── Retired             the center has retired the edge
    │   ├── OutdatedState       an edge runs on a copy, or an older version, of its state
    │   ├── LimitExceeded       more messages, or larger ones, than any edge sends
    │   ├── CorruptFrame        wrong checksum, or an unreadable body
    │   └── Unauthenticated     no credential, or the credential of another edge
    ├── NotFound                a query, edge, window or revision that does not exist
    ├── Conflict                it exists already, or exists with other content
    │   └── PreconditionFailed  another version than the one that a client has read
    ├── Overspent               a request needs more work than one request may need
    ├── ClientGone              the client of a request has left
    └── StorageError            a failure of disk, log, journal or database
        └── IncompatibleState   a state that another release wrote in another format

Each class has a stable `code`, which `center/api` maps to HTTP and `center/ingest` to gRPC.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from typing import ClassVar

_WORDS = re.compile(r"[^a-z0-9]+")


def plain(text: object) -> str:
    """Returns a text without control characters, such as the ones that move a terminal's cursor. Texts may come from
    other machines.
    """
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text))


class EdgewaterError(Exception):
    """Base of all errors that Edgewater raises deliberately. Its text is one line without control characters, whatever
    it quotes.
    """

    code: ClassVar[str] = "internal"

    def __str__(self) -> str:
        return plain(" ".join(map(str.strip, super().__str__().splitlines())))

    @property
    def message(self) -> str:
        return str(self)

    def faults(self) -> list[str]:
        """Returns what is wrong, one fault a line."""
        return [str(self)]


class InvalidInput(EdgewaterError):
    """Input that cannot be used.

    Args:
        field: path of the field, such as ``measures.bytes``; "" for the input as a whole.
        value: the rejected value; None if the value is missing.
        accepted: what is accepted, as a phrase that a user can act on.
        reason: why the value is not accepted, unless field and value make it obvious.
    """

    code = "invalid-input"

    def __init__(self, field: str, value: object, accepted: str, reason: str = "") -> None:
        self.field = field
        self.value = value
        self.accepted = accepted
        self.reason = reason
        shown = repr(value)
        if len(shown) > 200:
            shown = shown[:200] + "…"
        what = [] if value is None and reason else [f"{shown} is not accepted"]
        message = "; ".join([*what, *filter(None, [reason]), f"expected {accepted}"])
        super().__init__(f"{field}: {message}" if field else message)

    def __reduce__(self) -> tuple[type[InvalidInput], tuple[str, object, str, str]]:
        return type(self), (self.field, self.value, self.accepted, self.reason)


class InvalidConfig(InvalidInput):
    """A configuration file or flag that cannot be used.

    Attributes:
        place: file, line and column of the field, such as ``edge.yaml:3:5``; empty if it is in no file.
        others: further faults of the same file.
    """

    code = "invalid-config"
    place = ""
    others: tuple[InvalidConfig, ...] = ()

    def __str__(self) -> str:
        return "; also ".join(self.faults())

    def changed(self, change: Callable[[InvalidConfig], InvalidConfig]) -> InvalidConfig:
        """Returns the error with all its faults, each as `change` returns it."""
        first = change(self)
        first.others = tuple(other.changed(change) for other in self.others)
        return first

    def faults(self) -> list[str]:
        own = ": ".join(filter(None, (self.place, super().__str__())))
        return [own, *(line for other in self.others for line in other.faults())]


class InvalidQuery(InvalidInput):
    code = "invalid-query"


class InvalidRecord(InvalidInput):
    code = "invalid-record"


class InvalidRequest(InvalidInput):
    code = "invalid-request"


class SynopsisError(EdgewaterError):
    code = "synopsis"


class CorruptSynopsis(SynopsisError):
    code = "corrupt-synopsis"


class UnsupportedVersion(SynopsisError):
    code = "unsupported-version"


class IncompatibleSynopses(SynopsisError):
    code = "incompatible-synopses"


class ProtocolError(EdgewaterError):
    code = "protocol"


class Retired(ProtocolError):
    """The center has retired the edge."""

    code = "retired"


class OutdatedState(ProtocolError):
    """An edge runs on a copy of its state, or on an older state than the center has seen."""

    code = "outdated-state"


class LimitExceeded(ProtocolError):
    """A peer exceeds a limit of the gateway.

    Args:
        limit: a stable label, for metrics.
    """

    code = "limit-exceeded"

    def __init__(self, message: str, limit: str = "") -> None:
        super().__init__(message)
        self.limit = limit


class CorruptFrame(ProtocolError):
    code = "corrupt-frame"


class Unauthenticated(ProtocolError):
    code = "unauthenticated"


class NotFound(EdgewaterError):
    code = "not-found"


class Conflict(EdgewaterError):
    code = "conflict"


class PreconditionFailed(Conflict):
    """Another client has changed the object that a client wants to change."""

    code = "precondition-failed"


class Overspent(EdgewaterError):
    """A request needs more work than one request may need."""

    code = "too-much-work"


class ClientGone(EdgewaterError):
    """The client of a request has left, so nobody reads the reply."""

    code = "client-gone"


class StorageError(EdgewaterError):
    code = "storage"


class IncompatibleState(StorageError):
    """A state has another format, so the process ends when it starts. It has no separate code, because no client gets
    it.
    """


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Returns ``, did you mean sum?`` for the known name that is most like `name`; "" if no name is similar.

    Names of several words are compared word by word. Otherwise the words that they share would make ``count_if``
    similar to ``count_min``.
    """
    wanted = _WORDS.split(str(name).lower())
    similar = difflib.get_close_matches(str(name).lower(), list(known), 10, 0.66)
    near = next((text for text in similar if _same_words(wanted, _WORDS.split(text.lower()))), None)
    return f", did you mean {near}?" if near else ""


def _same_words(wanted: list[str], known: list[str]) -> bool:
    """Returns whether each word has a similar one at its place, or the names differ only in how they divide words."""
    if len(wanted) != len(known):
        return difflib.SequenceMatcher(None, "".join(wanted), "".join(known)).ratio() > 0.88
    return all(difflib.SequenceMatcher(None, a, b).ratio() >= 0.6 for a, b in zip(wanted, known, strict=True))


def installation(extra: str = "") -> str:
    """Returns the command that installs Edgewater with an extra, for messages about missing packages.

    The command names no package of PyPI. Edgewater is not there, and anybody may register its name.
    """
    what = f"'.[{extra}]'" if extra else "."
    return f"pip install {what} in a clone of Edgewater's repository"


def named(exc: Exception) -> str:
    """Returns an exception's message after its code, or after its class if it has no code."""
    return f"{exc.code if isinstance(exc, EdgewaterError) else type(exc).__name__}: {plain(exc)}"

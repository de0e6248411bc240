"""Configuration of both sides: reading YAML files, common field types, and errors that name the key.

A `Section` is a pydantic model that refuses unknown keys. Every error is an `InvalidConfig` with the key's path, its
value and what is accepted. For an unknown key, it also has the key that was probably meant.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from string import Template
from typing import Annotated, Any, TypeVar, get_args, get_origin

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, SecretStr, ValidationError, ValidationInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from edgewater.base.errors import InvalidConfig, InvalidInput, did_you_mean
from edgewater.base.plain_yaml import load_yaml, place_of
from edgewater.base.quantities import duration_ms, require_uncut, size_bytes
from edgewater.runtime.secret_files import read_secret_file, require_line

PRIVATE_UMASK = 0o077  # format: of file modes
"""The umask of long-running processes. Only their user can read the state and the secrets that they write."""

MAX_FAULTS = 10
"""The largest number of faults of a file that an error names."""
M = TypeVar("M", bound=BaseModel)
Result = TypeVar("Result")
log = logging.getLogger(__name__)


class Section(BaseModel):
    """Base of all configuration models. They are immutable and refuse unknown keys.

    The key of a field is its name. A duration has its unit in the file, as in ``5s``, so its key lacks the ``_ms`` of
    the field.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=lambda name: name.removesuffix("_ms"))


OLD_KEYS = {
    "gateway.credit": "gateway.credit_bytes",
    "gateway.max_frame": "gateway.max_frame_bytes",
    "gateway.compression_memory": "gateway.compression_bytes",
    "gateway.work": "gateway.work_per_s",
    "api.cache": "api.cache_bytes",
    "api.limits.responses": "api.limits.response_bytes",
    "spark.max_answer": "spark.max_answer_bytes",
    "api.limits.evaluate": "",
    "api.limits.evaluate_per_principal": "",
    "api.limits.idle": "",
    "spark.trigger": "",
    "limits.scheduling": "",
}
"""Keys of release 0.3.0 in both files, and the present keys. "": the key has no effect any more."""


def with_present_keys(document: object) -> object:
    """Returns the content of a file without keys of release 0.3.0, so that an upgrade needs no other file.

    Each of them is logged. If the present key is there, too, the old one is left, and refused.
    """
    for old, new in OLD_KEYS.items():
        path, key = old.rpartition(".")[::2]
        section = document
        for part in path.split("."):
            section = section.get(part) if isinstance(section, Mapping) else None
        present = new.rpartition(".")[2]
        if not isinstance(section, Mapping) or key not in section or present in section:
            continue
        if new:
            log.warning("%s is %s now; rename it in the file", old, new)
        else:
            log.warning("%s has no effect any more; remove it from the file", old)
        kept = {(present if name == key else name): value for name, value in section.items() if new or name != key}
        document = _with_section(document, path.split("."), kept)
    return document


def _with_section(document: object, path: list[str], section: Mapping[str, object]) -> Mapping[str, object]:
    """Returns a copy of the document with another section at a path."""
    if not path:
        return section
    assert isinstance(document, Mapping)
    return {**document, path[0]: _with_section(document[path[0]], path[1:], section)}


def read_yaml(path: str | Path, field: str, *, secret: bool = False) -> object:
    """Returns the content of a YAML file.

    Args:
        field: the setting that has the path, for errors.
        secret: whether errors must not quote the content.

    Raises:
        InvalidConfig: the file cannot be read or is not plain YAML.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidConfig(field, str(path), "a readable YAML file in UTF-8", str(exc)) from exc
    try:
        return load_yaml(text)
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        told = getattr(exc, "problem", None) or str(exc)
        fault = InvalidConfig(field, None, "YAML", "it is no YAML" if secret else " ".join(told.split()))
        fault.place = str(path) if mark is None else f"{path}:{mark.line + 1}:{mark.column + 1}"
        raise fault from (None if secret else exc)


@contextmanager
def naming_places(path: str | Path) -> Iterator[None]:
    """Adds file, line and column to each `InvalidConfig` about the content of a YAML file."""
    try:
        yield
    except InvalidConfig as exc:
        with suppress(OSError, yaml.YAMLError):
            text = Path(path).read_text(encoding="utf-8")
            for each in (exc, *exc.others):
                line, column = place_of(text, each.field)
                each.place = each.place or f"{path}:{line}:{column}"
        raise


def file_signature(path: Path | None) -> tuple[int, ...] | None:
    """Returns a value that differs if the file's content, or a link to the file, has changed; None if there is no
    file.
    """
    try:
        found = path.stat() if path is not None else None
    except OSError:
        return None
    return None if found is None else (found.st_mtime_ns, found.st_dev, found.st_ino, found.st_size)


class FileWatch:
    """Tells when files that a process uses have changed and are complete.

    An editor first empties a file and then writes it. So a change counts only when two looks in a row find the same.

    Attributes:
        is_settled: whether the last two looks found the same.
    """

    def __init__(self, *paths: Path | None) -> None:
        self._paths = paths
        self.is_settled = True
        self._used = self._seen = self._signatures()

    def read(self, load: Callable[[], Result], *, again: bool = False) -> Result | None:
        """Called now and then, by one thread at a time. Looks at the files, and loads them if they have changed.

        Args:
            load: reads the files.
            again: load them also if they have not changed, because the last attempt failed.

        Returns:
            What `load` returned; None if nothing has changed, or if a file is being changed, also during `load`.

        Raises:
            What `load` raises. The next call loads the files again.
        """
        if not self._settle() or not (again or self._seen != self._used):
            return None
        loaded = load()
        if not self._settle():
            return None
        self._used = self._seen
        return loaded

    def _settle(self) -> bool:
        before, self._seen = self._seen, self._signatures()
        self.is_settled = self._seen == before
        return self.is_settled

    def _signatures(self) -> tuple[tuple[int, ...] | None, ...]:
        return tuple(map(file_signature, self._paths))


def validate(model: type[M], document: object, context: Mapping[str, Any] | None = None) -> M:
    """Validates the content of a file.

    Args:
        document: the content; None for an empty file.
        context: context for the model's validators.

    Raises:
        InvalidConfig: names the key's path, its value and what is accepted.
    """
    if document is None:
        document = {}
    if not isinstance(document, Mapping):
        raise InvalidConfig("", document, f"a mapping with the keys {', '.join(_keys(model))}")
    require_uncut(document, InvalidConfig)
    try:
        return model.model_validate(document, context=context)
    except ValidationError as exc:
        raise _invalid_config(exc, model) from None


def refusal(accepted: str, reason: str = "", *, is_secret: bool = False) -> PydanticCustomError:
    """Returns the error that a validator raises to refuse its value. The error does not show a secret value."""
    return PydanticCustomError(
        "edgewater", "{accepted}", {"accepted": accepted, "reason": reason, "is_secret": is_secret}
    )


def parsed_by(parse: Callable[[object, str], Any]) -> BeforeValidator:
    """Returns a validator that calls a function of `edgewater.base.quantities` and passes its error message on."""

    def validated(value: object) -> Any:
        try:
            return parse(value, "")
        except InvalidInput as exc:
            raise refusal(exc.accepted, exc.reason) from exc

    return BeforeValidator(validated)


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port of ``host:port`` or ``[v6]:port``. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or int(port) > 65_535:
        raise ValueError(address)
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(address: str) -> bool:
    """Returns whether only this machine can reach a socket that listens at the ``host:port`` `address`."""
    host, _ = split_address(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _address(accepted: str, least_port: int) -> BeforeValidator:
    """Returns a validator of addresses.

    Args:
        accepted: what the error message says is accepted.
        least_port: the smallest accepted port.
    """

    def validated(value: object) -> object:
        try:
            _, port = split_address(value)  # type: ignore[arg-type]  # anything but text has no rpartition
        except (ValueError, AttributeError) as exc:
            reason = "it is a URL" if isinstance(value, str) and "://" in value else ""
            raise refusal(accepted, reason) from exc
        if port < least_port:
            raise refusal(accepted, f"its port is {port}")
        return value

    return BeforeValidator(validated)


INSTANT_ACCEPTED = "an ISO 8601 time such as 2013-01-01T00:00:00Z"


def _utc_millis(value: object) -> int:
    """Returns int64 ms of a time. YAML parses a time without quotes to a datetime."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise refusal(INSTANT_ACCEPTED) from None
    if not isinstance(value, datetime):
        raise refusal(INSTANT_ACCEPTED)
    return round((value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp() * 1000)


Instant = Annotated[int, BeforeValidator(_utc_millis)]
"""A time in int64 ms. It is written as ISO 8601; without a zone it is in UTC."""
Duration = Annotated[int, parsed_by(duration_ms)]
"""A duration in int64 ms, written as 30s."""
Size = Annotated[int, parsed_by(size_bytes)]
"""A size in bytes, written as 64KiB."""
Address = Annotated[str, _address("host:port, such as 127.0.0.1:7400; port 0 takes a free one", 0)]
"""An address at which to listen, written as host:port."""
RemoteAddress = Annotated[str, _address("host:port of the other side, such as 127.0.0.1:7400", 1)]
"""An address to which to connect, written as host:port."""


class FileSecret(SecretStr):
    """The current secret in a file. While the file cannot be read or has no secret, the last secret is used."""

    def __init__(self, secret: str, path: Path, signature: tuple[int, ...] | None, is_pem: bool) -> None:
        super().__init__(secret)
        self._path = path
        self._is_pem = is_pem
        self._signature = signature

    def get_secret_value(self) -> str:
        """Returns the secret. Reads the file again if it has changed, as when the kubelet or a secrets manager renews
        it.
        """
        signature = file_signature(self._path)
        if signature != self._signature:
            with suppress(OSError, ValueError):
                self._secret_value = read_secret_file(self._path, is_pem=self._is_pem)
                self._signature = signature
        return self._secret_value


def read_secret(value: object, environ: Mapping[str, str], *, is_pem: bool = False) -> SecretStr | None:
    """Returns a secret, given as text, ``{env: NAME}`` or ``{file: PATH}``. For validators.

    A secret is one line of printable characters. A secret from a file changes with the file (`FileSecret`).

    Args:
        is_pem: whether the secret may have several lines.
    """
    if value is None or isinstance(value, SecretStr):
        return value
    path = _referenced_file(value, environ)
    # The signature is taken before the read, so that a change during the read is noticed later.
    signature = file_signature(path)
    text = text_or_referenced(value, environ, "the secret itself", is_pem=is_pem)
    return SecretStr(text) if path is None else FileSecret(text, path, signature, is_pem)


def text_or_referenced(value: object, environ: Mapping[str, str], itself: str, *, is_pem: bool = False) -> str:
    """Returns the text, or reads it from ``{env: NAME}`` or ``{file: PATH}``.

    Args:
        itself: the name of the text in the error that a validator raises.
    """
    if isinstance(value, str) and value:
        return _line(value, is_pem)
    if isinstance(value, Mapping) and len(value) == 1:
        ((kind, name),) = value.items()
        if kind == "env" and isinstance(name, str):
            if not environ.get(name):
                raise refusal(f"the environment variable {name} to be set", "it is not set, or empty")
            return _line(environ[name], is_pem)
        if (path := _referenced_file(value, environ)) is not None:
            try:
                return read_secret_file(path, is_pem=is_pem)
            except (OSError, ValueError) as exc:
                raise refusal("a readable text file of one line", str(exc)) from exc
    raise refusal(f"{itself}, {{env: NAME}} or {{file: PATH}}")


def _line(text: str, is_pem: bool) -> str:
    try:
        return require_line(text, is_pem=is_pem)
    except ValueError as exc:
        raise refusal("one line of printable characters", is_secret=True) from exc


def _referenced_file(value: object, environ: Mapping[str, str]) -> Path | None:
    """Returns the path of ``{file: PATH}``, in which ``${NAME}`` stands for a variable; None for any other value."""
    if not isinstance(value, Mapping) or list(value) != ["file"] or not isinstance(value["file"], str):
        return None
    try:
        return Path(Template(value["file"]).substitute(environ))
    except KeyError as exc:
        raise refusal(f"the environment variable {exc.args[0]} to be set", "it is not set") from exc
    except ValueError as exc:
        raise refusal("a path in which ${NAME} is a variable and $$ is a dollar sign") from exc


def _secret(value: object, info: ValidationInfo) -> SecretStr | None:
    return read_secret(value, (info.context or {}).get("environ", os.environ))


Secret = Annotated[SecretStr, BeforeValidator(_secret)]
"""A secret, given as text, ``{env: NAME}`` or ``{file: PATH}``. `validate` may pass the environment as ``environ`` in
its context.
"""


def _proxy_url(value: SecretStr) -> SecretStr:
    if not value.get_secret_value().startswith("http://"):
        raise refusal("a URL such as http://proxy.example.com:3128", is_secret=True)
    return value


ProxyUrl = Annotated[Secret, AfterValidator(_proxy_url)]
"""The URL of an HTTP proxy, which may have a user and a password. Only such a key chooses a proxy, no variable does."""


def _invalid_config(error: ValidationError, root: type[BaseModel]) -> InvalidConfig:
    """Returns an error for the first fault that pydantic has found, with the others."""
    # A misspelt key also causes the error of a missing key. The error of the unknown key is the better message.
    errors = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    first, *others = (_fault(each, root) for each in errors[:MAX_FAULTS])
    first.others = tuple(others)
    return first


def _fault(first: ErrorDetails, root: type[BaseModel]) -> InvalidConfig:
    # pydantic puts names of validators between the keys. Users do not know these names, so they are removed.
    location = tuple(part for part in first["loc"] if not str(part).startswith("function-"))
    field, context = ".".join(str(part) for part in location), first.get("ctx", {})
    if first["type"] == "extra_forbidden":
        known = _keys_at(root, location[:-1])
        reason = f"unknown key{did_you_mean(location[-1], known)}"
        if new := OLD_KEYS.get(field):
            reason = f"it is the old name of {new}, which is there, too"
        return InvalidConfig(field, first["input"], f"one of the keys {', '.join(known)}", reason)
    if first["type"] == "missing":
        return InvalidConfig(field, None, "a value", "missing key")
    if first["type"] == "edgewater":
        value = "…" if context["is_secret"] else _without_values(first["input"])
        return InvalidConfig(field, value, context["accepted"], context["reason"])
    if first["type"] == "string_pattern_mismatch":
        return InvalidConfig(field, first["input"], f"text that matches {context['pattern']}")
    return InvalidConfig(field, first["input"], as_phrase(first["msg"]))


def _without_values(value: object) -> object:
    """Returns a value in the form in which an error may show it. Only the keys of a mapping are shown, as values may be
    secrets.
    """
    return f"keys {', '.join(map(str, value))}" if isinstance(value, dict) and value else value


def as_phrase(message: str) -> str:
    """Returns pydantic's message as a phrase that follows "expected"."""
    phrase = re.sub(r"^(\w+ should (be |have )?|Value error, )", "", message)
    return phrase if phrase[1:2].isupper() else phrase[:1].lower() + phrase[1:]


def _keys_at(root: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Returns the keys of the model at a location."""
    kind: Any = root
    for part in location:
        kind = _inner(_without_none(kind), part)
    model = _without_none(kind)
    return _keys(model) if isinstance(model, type) and issubclass(model, BaseModel) else []


def _keys(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _inner(kind: Any, part: int | str) -> Any:
    """Returns the type of a key or an index in a container or model."""
    if get_origin(kind) in (dict, list):
        return get_args(kind)[-1]
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            if part in (name, field.alias):
                return field.annotation
    return None


def _without_none(kind: Any) -> Any:
    """Returns X for ``X | None``, and other types unchanged."""
    if get_origin(kind) in (dict, list) or isinstance(kind, type):
        return kind
    return next((inner for inner in get_args(kind) if inner is not type(None)), None)

"""From pydantic's errors to ours: the key's path, its value, what is accepted, and the likely typo."""

from __future__ import annotations

import difflib
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from edgewater.errors import InvalidConfig


def invalid_config(error: ValidationError, root: type[BaseModel]) -> InvalidConfig:
    """The first mistake that pydantic found; says how many more there are.

    Args:
        root: the model that was validated; its keys are what unknown ones are compared with.
    """
    # A misspelt key is also a missing one: the typo is the better message.
    errors = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    first, more = errors[0], len(errors) - 1
    location = tuple(part for part in first["loc"] if part != "function-before")
    field, context = ".".join(str(part) for part in location), first.get("ctx", {})
    further = f"{more} more after it" if more else ""
    if first["type"] == "extra_forbidden":
        known = _keys_at(root, location[:-1])
        near = difflib.get_close_matches(str(location[-1]), known, 1)
        reason = f"unknown key, did you mean {near[0]}?" if near else "unknown key"
        return InvalidConfig(field, first["input"], f"one of the keys {', '.join(known)}", _join(reason, further))
    if first["type"] == "missing":
        return InvalidConfig(field, None, "a value", _join("missing key", further))
    if first["type"] == "edgewater":
        return InvalidConfig(field, first["input"], context["accepted"], _join(context["reason"], further))
    if first["type"] == "string_pattern_mismatch":
        return InvalidConfig(field, first["input"], f"text that matches {context['pattern']}", further)
    return InvalidConfig(field, first["input"], _as_phrase(first["msg"]), further)


def _join(*reasons: str) -> str:
    return ", ".join(reason for reason in reasons if reason)


def _as_phrase(message: str) -> str:
    phrase = message.removeprefix("Input should be ").removeprefix("Input should ")
    return phrase[:1].lower() + phrase[1:]


def _keys_at(root: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """The keys that the model at a location has."""
    kind: Any = root
    for part in location:
        kind = _step(_model_or_container(kind), part)
    model = _model_or_container(kind)
    if isinstance(model, type) and issubclass(model, BaseModel):
        return [field.alias or name for name, field in model.model_fields.items()]
    return []


def _step(kind: Any, part: int | str) -> Any:
    if get_origin(kind) in (dict, list):
        return get_args(kind)[-1]
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            if part in (name, field.alias):
                return field.annotation
    return None


def _model_or_container(kind: Any) -> Any:
    """Of ``X | None``, X."""
    if get_origin(kind) in (dict, list) or isinstance(kind, type):
        return kind
    return next((inner for inner in get_args(kind) if inner is not type(None)), None)

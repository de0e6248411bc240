"""The targets of the fuzzers. A `Target` has honest inputs, a mutator, and a run that returns or raises.

A module that defines targets calls `register` for each and is listed in `MODULES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from bench.hostile.mutate import Mutator, mutated_bytes
from edgewater.base.errors import EdgewaterError

MODULES = (
    "bench.hostile.synopses",
    "bench.hostile.frames",
    "bench.hostile.session_streams",
    "bench.hostile.statements",
    "bench.hostile.arrivals",
    "bench.hostile.pushes",
    "bench.hostile.otlp",
    "bench.hostile.requests",
)


def four_times(data: bytes) -> int:
    """Returns four times the input's bytes, and 1 MiB."""
    return 4 * len(data) + (1 << 20)


@dataclass(frozen=True)
class Target:
    """An entry of bytes from outside.

    Attributes:
        corpus: returns honest inputs. It is called once, before anything is measured.
        run: processes an input as the product does. It may return, or raise one of `errors`. Any other exception is a
            failure, and so is a warning.
        mutate: returns a changed input; the default changes bytes.
        errors: the errors that an input may raise.
        limit: returns the bytes of memory that a run of an input may take; None: the limit of the process.
        seconds: CPU time that a run may take.
    """

    name: str
    corpus: Callable[[], list[bytes]]
    run: Callable[[bytes], object]
    mutate: Mutator = mutated_bytes
    errors: tuple[type[Exception], ...] = (EdgewaterError,)
    limit: Callable[[bytes], int | None] = four_times
    seconds: float = 1.0


_TARGETS: dict[str, Target] = {}


def register(target: Target) -> None:
    """Adds a target. Raises ValueError if its name is taken."""
    if target.name in _TARGETS:
        raise ValueError(f"target {target.name} is registered already")
    _TARGETS[target.name] = target


def all_targets() -> dict[str, Target]:
    """Returns the targets of all modules by name."""
    for module in MODULES:
        importlib.import_module(module)
    return dict(_TARGETS)

"""Discovery of plugins through groups of entry points. All groups share it (synopses, record functions, sources).

A group is loaded when a name is looked up that is not built in. So a process that needs no plugin imports no plugin. An
entry point is registered completely or not at all. A failing entry point causes a warning and a `PluginProblem`, and
the other entry points are loaded.
"""

from __future__ import annotations

import re
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Generic, TypeVar, cast

NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
"""The names that a plugin may register."""


@dataclass(frozen=True, slots=True)
class PluginOrigin:
    """The origin of a plugin: ``distribution version`` and ``name = module:object``."""

    distribution: str
    entry_point: str

    def __str__(self) -> str:
        return f"{self.distribution} (entry point {self.entry_point})"


@dataclass(frozen=True, slots=True)
class PluginProblem:
    """The reason why an entry point was not loaded.

    Attributes:
        what: the reason.
        provides: what the entry points of the group provide, in the plural.
    """

    origin: PluginOrigin
    what: str
    provides: str = "synopses"

    def __str__(self) -> str:
        return f"{self.provides} of {self.origin}: {self.what}"


class InvalidPlugin(Exception):
    """An object does not satisfy the contract of its entry-point group."""


class PluginLoader(ABC):
    """Loads the entry points of one group, once, at the first call of `load`.

    Args:
        find: returns the entry points; None for the installed entry points.

    Attributes:
        problems: entry points that were not loaded.
        origins: origin by registered name. Built-in names are absent.
    """

    group: ClassVar[str]
    provides: ClassVar[str]
    warning: ClassVar[type[UserWarning]]

    def __init__(self, find: Callable[[], Iterable[EntryPoint]] | None = None) -> None:
        self._find = find or (lambda: entry_points(group=self.group))
        self._lock = threading.RLock()
        self._loaded = False
        self.problems: list[PluginProblem] = []
        self.origins: dict[str, PluginOrigin] = {}

    def load(self) -> None:
        """Registers the objects of all entry points.

        While a plugin is imported, its own look-ups return only built-in names.
        """
        with self._lock:
            if self._loaded:
                return
            self._loaded = True
            # Sorted, so that if two plugins have the same name, every process registers the same one.
            for point in sorted(self._find(), key=lambda p: (_distribution(p), p.name, p.value)):
                origin = PluginOrigin(_distribution(point), f"{point.name} = {point.value}")
                try:
                    self._register(point.load(), origin)
                except Exception as exc:  # third-party code may raise any exception; the other plugins are still loaded
                    reason = str(exc) if isinstance(exc, InvalidPlugin) else f"{type(exc).__name__}: {exc}"
                    self.problems.append(PluginProblem(origin, reason, self.provides))
            # After the loop, because if warnings are errors, the first one would prevent loading the other plugins.
            for problem in self.problems:
                warnings.warn(str(problem), self.warning, stacklevel=3)

    @abstractmethod
    def _register(self, provided: object, origin: PluginOrigin) -> None:
        """Registers everything that an entry point provides. If it raises an exception, it must have registered
        nothing.
        """

    def _check_free(self, name: str, taken: bool, what: str) -> None:
        if taken:
            owner = self.origins.get(name, "edgewater itself")
            raise InvalidPlugin(f"the {what} {name!r} is already registered by {owner}")

    def hint(self) -> str:
        """Returns a part of an error message for an unknown name. It names missing or failed plugins as possible
        causes.
        """
        self.load()
        failed = "".join(f"; not loaded: {p}" for p in self.problems)
        return f"the package that provides it (entry point {self.group}) may not be installed{failed}"


K = TypeVar("K")


class KindLoader(PluginLoader, Generic[K]):
    """The kinds of sources, or of sinks, of installed packages. A kind has a `name`, a `config` and one method.

    Attributes:
        method: the method that a kind must have.
        example: a name of a kind.
        reserved: names that no package may use.
    """

    method: ClassVar[str]
    example: ClassVar[str]
    reserved: ClassVar[tuple[str, ...]] = ()

    def __init__(self, find: Callable[[], Iterable[EntryPoint]] | None = None) -> None:
        super().__init__(find)
        self._kinds: dict[str, K] = {}

    def get(self, name: str) -> K | None:
        """Returns the kind of this name, or None if no package provides it. The first call loads all packages."""
        self.load()
        return self._kinds.get(name)

    @property
    def names(self) -> list[str]:
        self.load()
        return sorted(self._kinds)

    def _register(self, provided: object, origin: PluginOrigin) -> None:
        from pydantic import BaseModel

        kind: Any = provided
        name, config, what = getattr(kind, "name", None), getattr(kind, "config", None), f"kind of {self.provides}"
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise InvalidPlugin(f"the name of a {what} is {name!r}; expected a text such as {self.example}")
        if not isinstance(config, type) or not issubclass(config, BaseModel):
            raise InvalidPlugin(f"the config of the kind {name} is {config!r}; expected a class of pydantic.BaseModel")
        if not callable(getattr(kind, self.method, None)):
            raise InvalidPlugin(f"the kind {name} has no method {self.method}")
        self._check_free(name, name in self.reserved or name in self._kinds, what)
        self._kinds[name] = cast(K, provided)
        self.origins[name] = origin


def _distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "(unknown distribution)"

"""What users' packages bring, found through groups of entry points: one discovery for every group.

A group is looked through when a name comes up that the house does not have, so what needs no package imports none.
An entry point is taken whole or not at all. One that fails is a warning and a `Problem`; the others go on.
"""

from __future__ import annotations

import re
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import ClassVar

NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
"""What plugins may call their things."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a plugin comes from: ``distribution version`` and ``name = module:object``."""

    distribution: str
    entry_point: str

    def __str__(self) -> str:
        return f"{self.distribution} (entry point {self.entry_point})"


@dataclass(frozen=True, slots=True)
class Problem:
    """Why an entry point was not taken.

    Attributes:
        brings: what entry points of its group bring, in the plural.
    """

    origin: Origin
    what: str
    brings: str = "synopses"

    def __str__(self) -> str:
        return f"{self.brings} of {self.origin}: {self.what}"


class Unfit(Exception):
    """Why something is not what its group of entry points is for."""


class Discovery(ABC):
    """The entry points of one group, loaded once, at the first call of `load`.

    Args:
        find: the entry points; None: those that are installed.

    Attributes:
        problems: of entry points that were not taken.
        origins: name -> where it is from; those of the house are not in it.
    """

    group: ClassVar[str]
    brings: ClassVar[str]
    warning: ClassVar[type[UserWarning]]

    def __init__(self, find: Callable[[], Iterable[EntryPoint]] | None = None) -> None:
        self._find = find or (lambda: entry_points(group=self.group))
        self._lock = threading.RLock()
        self._loaded = False
        self.problems: list[Problem] = []
        self.origins: dict[str, Origin] = {}

    def load(self) -> None:
        """Registers what the entry points bring. A plugin that asks for names while it is imported sees the house's."""
        with self._lock:
            if self._loaded:
                return
            self._loaded = True
            # In a fixed order, so that of two plugins that want one name the same one has it everywhere.
            for point in sorted(self._find(), key=lambda p: (_distribution(p), p.name, p.value)):
                origin = Origin(_distribution(point), f"{point.name} = {point.value}")
                try:
                    self._take(point.load(), origin)
                except Exception as exc:  # whatever a stranger's code raises must not stop the others
                    reason = str(exc) if isinstance(exc, Unfit) else f"{type(exc).__name__}: {exc}"
                    self.problems.append(Problem(origin, reason, self.brings))
            # Last: where warnings are errors, the first one would keep the others out.
            for problem in self.problems:
                warnings.warn(str(problem), self.warning, stacklevel=3)

    @abstractmethod
    def _take(self, brought: object, origin: Origin) -> None:
        """Registers all that an entry point names, or raises and registers nothing."""

    def _check_free(self, name: str, taken: bool, what: str) -> None:
        if taken:
            raise Unfit(f"the {what} {name!r} is registered already, by {self.origins.get(name, 'edgewater itself')}")

    def hint(self) -> str:
        """What to say when a name is not known: that a plugin may be missing, and which did not load."""
        self.load()
        failed = "".join(f"; not loaded: {p}" for p in self.problems)
        return f"a package that brings it (entry point {self.group}) may be missing here{failed}"


def _distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "(unknown distribution)"

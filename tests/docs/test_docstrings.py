"""The examples in docstrings hold, and the names that a user meets first have one."""

from __future__ import annotations

import doctest
import pkgutil
from collections.abc import Iterator
from importlib import import_module

import edgewater.client
import edgewater.synopses
from center.sinks.base import SinkKind
from edge.source_kinds import SourceKind
from edgewater.synopses import SingleSynopsis

CLIENT = (edgewater.client.Center, edgewater.client.Answer, edgewater.client.Column, edgewater.client.Interval)
INTERFACES = (SinkKind, SourceKind, edgewater.synopses.Synopsis)


def _modules() -> Iterator[str]:
    yield from ("center.sinks.base", "edge.source_kinds")
    for package in (edgewater.client, edgewater.synopses):
        yield from (found.name for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))


def test_the_examples_in_docstrings_hold() -> None:
    finder, failures = doctest.DocTestFinder(exclude_empty=True), list[str]()
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.FAIL_FAST)
    for module in map(import_module, _modules()):
        for example in finder.find(module):
            runner.run(example, out=failures.append)
    assert not failures, "\n".join(failures)


def test_each_kind_of_synopsis_and_each_interface_of_a_plugin_has_an_example() -> None:
    exported = (getattr(edgewater.synopses, name) for name in edgewater.synopses.__all__)
    kinds = [each for each in exported if isinstance(each, type) and issubclass(each, SingleSynopsis)]
    kinds = [kind for kind in kinds if hasattr(kind, "kind")]  # not the bases
    assert len(kinds) > 10
    assert [each.__name__ for each in (*kinds, *INTERFACES, *CLIENT) if ">>>" not in (each.__doc__ or "")] == []

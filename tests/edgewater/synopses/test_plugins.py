"""Synopses of other distributions, which `importlib.metadata` finds in real `dist-info` folders on a path."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, distributions
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from edgewater.base.errors import InvalidQuery, UnsupportedVersion
from edgewater.functions_cli import synopses
from edgewater.model.measure import Measure
from edgewater.synopses import Count, HyperLogLog, from_bytes, plugins, registry
from edgewater.synopses.encoding import codec
from edgewater.synopses.plugins import PluginProblem, Plugins, SynopsisPluginWarning
from edgewater.synopses.registry import function_named, function_names, stack_from_message
from tests.insides import forget_registrations
from tests.packages import write_package
from tests.refusals import refused

Install = Callable[[str, dict[str, str], str], None]

TALLY = """
    from edgewater.synopses.exact.aggregates import CountStack
    from edgewater.synopses.registry import Function
    from edgewater.synopses.single import SingleSynopsis

    class {name}Stack(CountStack):
        kind = "{kind}"

    class {name}(SingleSynopsis):
        stack_type = {name}Stack
        kind = {name}Stack.kind
        properties = {name}Stack.properties
        questions = {name}Stack.questions
        types = ("int64",)

        def __init__(self):
            super().__init__({name}Stack(1))

    FUNCTION = Function("{kind}", lambda *_: {name}Stack())
    ALL = ({name}, FUNCTION)
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs distributions on a separate path, the only one that `Plugins` searches. Restores the registry
    afterwards."""
    forget_registrations(monkeypatch)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(plugins, "INSTALLED", Plugins(lambda: points(tmp_path)))
    modules = set(sys.modules)

    def put(distribution: str, entries: dict[str, str], source: str) -> None:
        write_package(tmp_path, distribution, source, plugins.GROUP, entries)

    yield put
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def points(path: Path) -> list[EntryPoint]:
    return [p for d in distributions(path=[str(path)]) for p in d.entry_points.select(group=plugins.GROUP)]


def test_a_package_provides_a_kind_a_function_and_a_single_synopsis(install: Install) -> None:
    install("tallies", {"tally": "tallies:ALL"}, TALLY.format(name="Tally", kind="tally"))
    assert "tallies" not in sys.modules, "nothing is imported before it is asked for"
    assert function_named("count") is not None and "tallies" not in sys.modules
    measure = Measure.parse("n", "tally(x)")
    assert "tally" in function_names()
    stack = measure.stack(None)
    stack.grow(2)
    stack.update(np.array([1, 1, 0]), np.array([5, 6, 7]))
    assert stack_from_message(stack.to_message()).query().value.tolist() == [1, 2]
    one = sys.modules["tallies"].Tally()
    one.update([1, 2, 3])
    again = from_bytes(one.to_bytes())
    assert type(again).__name__ == "Tally" and again.query(Count()).value == 3
    assert str(plugins.INSTALLED.origins["tally"]) == "tallies 1.2 (entry point tally = tallies:ALL)"


def test_reading_bytes_loads_the_plugin_of_their_kind(install: Install) -> None:
    install("tallies", {"tally": "tallies:ALL"}, TALLY.format(name="Tally", kind="tally"))
    message = registry.function_named("count").make((), None).to_message()  # type: ignore[union-attr]
    message.kind = "tally"
    assert type(stack_from_message(message)).__name__ == "TallyStack"


NO_IMPORT = "import a_package_that_is_not_there\n"
TAKEN_KIND = TALLY.format(name="Count", kind="count")
TAKEN_FUNCTION = """
    from edgewater.synopses.exact.aggregates import CountStack
    from edgewater.synopses.registry import Function
    ALL = Function("distinct", lambda *_: CountStack())
"""
NO_STACK = """
    class Sketch:
        kind = "sketch"
        def update(self, codes, values): ...
    ALL = Sketch
"""
UNLISTED = TALLY.format(name="Tally", kind="tally") + "    ALL = FUNCTION\n"
NO_PROPERTIES = TALLY.format(name="Tally", kind="tally") + "    TallyStack.properties = 'commutative'\n"
CRASHES = """
    from edgewater.synopses.exact.aggregates import CountStack
    from edgewater.synopses.registry import Function
    def make(parameters, type_):
        raise ZeroDivisionError("by design")
    ALL = Function("crash", make)
"""


@pytest.mark.parametrize(
    ("source", "what"),
    [
        (NO_IMPORT, "ModuleNotFoundError: No module named 'a_package_that_is_not_there'"),
        ("x = 1\n", "AttributeError"),
        (TAKEN_KIND, "the kind 'count' is already registered by edgewater itself"),
        (TAKEN_FUNCTION, "the function 'distinct' is already registered by edgewater itself"),
        (NO_STACK, "Sketch is not a Stack: it lacks __len__, grow, merge"),
        ("ALL = 7\n", "7 is none of: a Stack class, a Function, a SingleSynopsis class"),
        (UNLISTED, "makes a stack of kind 'tally', which is not registered"),
        (NO_PROPERTIES, "TallyStack.properties is 'commutative'"),
        (CRASHES, "ZeroDivisionError: by design"),
    ],
)
def test_an_invalid_plugin_is_named_and_the_others_are_loaded(install: Install, source: str, what: str) -> None:
    install("broken", {"theirs": "broken:ALL"}, source)
    install("tallies", {"tally": "tallies:ALL"}, TALLY.format(name="Other", kind="other"))
    kinds = set(registry._KINDS)
    with pytest.warns(SynopsisPluginWarning) as caught:
        assert function_named("other") is not None
    message = str(caught[0].message)
    assert message.startswith("synopses of broken 1.2 (entry point theirs = broken:ALL): ") and what in message
    assert set(registry._KINDS) - kinds == {"other"}, "a plugin that fails leaves nothing behind"
    with refused(InvalidQuery, "measures.n"):
        Measure.parse("n", "nobodys(x)")


def test_the_first_package_by_name_gets_a_name_that_two_packages_define(install: Install) -> None:
    install("zebra", {"tally": "zebra:ALL"}, TALLY.format(name="Tally", kind="tally"))
    install("aardvark", {"tally": "aardvark:ALL"}, TALLY.format(name="Tally", kind="tally"))
    with pytest.warns(SynopsisPluginWarning, match=r"zebra 1.2 .*'tally' is already registered by aardvark 1.2"):
        plugins.INSTALLED.load()
    plugins.INSTALLED.load()  # the second call does not warn again
    assert plugins.INSTALLED.origins["tally"].distribution == "aardvark 1.2"


def test_a_package_may_look_up_functions_while_it_is_imported(install: Install) -> None:
    source = TALLY.format(name="Tally", kind="tally")
    install("nosy", {"tally": "nosy:ALL"}, source + "    from edgewater.synopses.registry import function_named\n"
            "    assert function_named('tally') is None and function_named('count') is not None\n")  # fmt: skip
    assert function_named("tally") is not None


def test_the_error_for_an_unknown_kind_says_that_a_package_may_not_be_installed(install: Install) -> None:
    message = HyperLogLog().stack.to_message()
    message.kind = "moments"
    with pytest.raises(UnsupportedVersion):
        stack_from_message(message)
    with pytest.raises(UnsupportedVersion):
        from_bytes(codec.seal(message))


def test_the_command_lists_functions_with_their_origin_and_fails_for_a_broken_package(install: Install) -> None:
    install("tallies", {"tally": "tallies:ALL"}, TALLY.format(name="Tally", kind="tally"))
    listed = CliRunner().invoke(synopses)
    assert listed.exit_code == 0, listed.output
    assert "tally(int64 or float64)\n    answers Count; mergeable, commutative" in listed.output
    assert "from tallies 1.2 (entry point tally = tallies:ALL)" in listed.output
    plugins.INSTALLED.problems.append(PluginProblem(plugins.INSTALLED.origins["tally"], "it is broken"))
    as_json = CliRunner().invoke(synopses, ["--json"])
    assert as_json.exit_code == 1 and "it is broken" in as_json.stderr
    functions = {f["name"]: f for f in json.loads(as_json.stdout)["functions"]}
    assert functions["kll"]["parameters"]["k"]["default"] == "200"
    assert functions["equi_width"]["questions"] is None

"""The `edgewater` command: late loading of sub-commands, one-line errors, the version."""

import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from edgewater.__main__ import GROUP, LISTED, Commands, main
from edgewater.base.errors import InvalidConfig, StorageError


def invoke(points: dict[str, str], *args: str) -> Result:
    found = [EntryPoint(name, value, GROUP) for name, value in points.items()]
    return CliRunner().invoke(Commands("edgewater", find=lambda: found), list(args), prog_name="edgewater")


@click.command()
@click.argument("how")
def failing(how: str) -> None:
    """Raises the error that its argument names."""
    if how == "package":
        raise ModuleNotFoundError("No module named 'pyspark.sql'", name="pyspark.sql")
    if how == "own":
        raise ModuleNotFoundError("No module named 'center.nothing'", name="center.nothing")
    if how == "input":
        raise InvalidConfig("api.listen", "x", "host:port")
    raise StorageError("the disk is full")


FAILING = {"center": f"{__name__}:failing"}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    # With --import-mode=importlib a test module is not importable by name: entry points must find this one.
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or sys.modules[failing.callback.__module__])


def test_the_version_is_that_of_the_installed_distribution() -> None:
    assert CliRunner().invoke(main, ["--version"]).output == f"edgewater {version('edgewater')}\n"


def test_the_project_declares_one_version() -> None:
    root = Path(__file__).parents[2]
    (declared,) = re.findall(r'^version = "(.+)"$', (root / "pyproject.toml").read_text(), re.MULTILINE)
    images = [
        line for file in ("deploy/compose.yaml", "deploy/README.md") for line in (root / file).read_text().split()
    ]
    tags = {word.rpartition(":")[2] for word in images if word.startswith(("edgewater-center:", "edgewater-edge:"))}
    assert tags == {declared}


def test_a_command_whose_package_is_not_installed_says_how_to_install_it() -> None:
    result = invoke({"center": "a_package_nobody_has.cli:center"}, "center", "run", "--data-dir", "/tmp/x", "--help")
    assert result.exit_code == 1
    assert "pip install '.[center]'" in result.output
    assert "a_package_nobody_has" in result.output


def test_help_lists_a_command_that_is_not_installed() -> None:
    result = invoke({"center": "a_package_nobody_has.cli:center"}, "--help")
    assert result.exit_code == 0
    assert "not installed: the extra center" in result.output


def test_a_dependency_missing_at_run_time_is_named_with_the_command_that_installs_it() -> None:
    result = invoke(FAILING, "center", "package")
    assert result.exit_code == 1
    assert "pyspark" in result.output
    assert "pip install '.[center]'" in result.output


def test_a_missing_module_of_edgewater_is_a_bug_and_gives_no_installation_hint() -> None:
    result = invoke(FAILING, "center", "own")
    assert isinstance(result.exception, ModuleNotFoundError)


def test_bad_input_ends_with_code_2_and_one_line() -> None:
    result = invoke(FAILING, "center", "input")
    assert result.exit_code == 2
    assert result.output == "edgewater: api.listen: 'x' is not accepted; expected host:port\n"


def test_any_other_edgewater_error_ends_with_code_1_and_one_line() -> None:
    result = invoke(FAILING, "center", "disk")
    assert (result.exit_code, result.output) == (1, "edgewater: the disk is full\n")


def test_an_unknown_command_is_refused() -> None:
    assert invoke({}, "nonsense").exit_code == 2
    meant = CliRunner().invoke(main, ["qury", "ls"])
    assert (meant.exit_code, "did you mean query?" in meant.output) == (2, True)


def test_the_kernel_and_its_command_import_neither_side() -> None:
    code = (
        "import sys, edgewater.__main__; print([m for m in sys.modules if m.split('.')[0] in ('edge','center','sim')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


HEAVY = ("pyarrow", "grpc", "pyspark", "numpy", "pydantic", "fastapi", "sqlglot", "httpx", "rich", "yaml")


def modules_after(*args: str, env: dict[str, str] | None = None) -> set[str]:
    code = (
        "import sys; from edgewater.__main__ import main\n"
        "try: main(sys.argv[1:], prog_name='edgewater')\n"
        "finally: print('\\n' + ' '.join(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **(env or {})},
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "args", [("--help",), ("--version",), ("edge", "--help"), ("edge", "run", "--help"), ("synopses", "--help")]
)
def test_help_imports_nothing_heavy(args: tuple[str, ...]) -> None:
    assert modules_after(*args).isdisjoint(HEAVY)


def test_completing_a_command_imports_nothing_heavy() -> None:
    env = {"_EDGEWATER_COMPLETE": "bash_complete", "COMP_WORDS": "edgewater ed", "COMP_CWORD": "1"}
    assert modules_after(env=env).isdisjoint(HEAVY)


@pytest.mark.parametrize("args", [("query", "--help"), ("top", "--help"), ("edges", "--help")])
def test_commands_that_ask_a_center_start_without_arrow(args: tuple[str, ...]) -> None:
    assert modules_after(*args).isdisjoint({"pyarrow", "numpy", "pydantic", "sqlglot"})


@pytest.mark.parametrize("args", [("query", "--help"), ("top", "--help"), ("center", "--help")])
def test_help_of_a_command_imports_neither_spark_nor_grpc(args: tuple[str, ...]) -> None:
    assert modules_after(*args).isdisjoint({"pyspark", "grpc", "fastapi", "sqlglot", "pandas"})


def test_each_command_is_listed_with_its_own_first_sentence() -> None:
    points = {point.name: point for point in entry_points(group=GROUP) if point.dist and point.dist.name == "edgewater"}
    assert LISTED.keys() == points.keys()
    for name, point in points.items():
        assert LISTED[name].summary == point.load().get_short_help_str(200)


def test_help_lists_a_command_whose_package_is_not_installed() -> None:
    result = invoke({"query": "a_package_nobody_has.cli:query"}, "--help")
    assert "not installed: the extra client" in result.output


def test_a_package_of_the_same_name_in_another_distribution_is_named(tmp_path: Path) -> None:
    for name, text in {"edge/__init__.py": "", "edge_tools-1.0.dist-info/METADATA": "Name: edge-tools\nVersion: 1.0\n",
                       "edge_tools-1.0.dist-info/RECORD": "edge/__init__.py,,\n"}.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for command in (["edge", "run"], ["edge", "--help"]):
        done = subprocess.run(
            [sys.executable, "-m", "edgewater", *command], env={**os.environ, "PYTHONPATH": str(tmp_path)},
            cwd=tmp_path, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert "edge-tools" in done.stderr and "virtual environment" in done.stderr

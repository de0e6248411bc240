"""`python -m bench.goals` says which figure is kept, lost, failed or not run, and fails for the second and third."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bench.goals import GOALS, benches, main

ROOT = Path(__file__).resolve().parents[2]
WRITES = "python -c 'print([1.2])'"


def judged(folder: Path, *arguments: str, command: str = WRITES, bench: str = "", figure: str = "most = 1") -> Result:
    path = folder / "goals.toml"
    path.write_text(
        f'''[[bench]]\ncommand = """{command}"""\nminutes = 1\n{bench}
        [[bench.figure]]\nname = "ratio"\npage = "docs/page.md"\nvalue = "data[0]"\n{figure}'''
    )
    return CliRunner().invoke(main, ["--file", str(path), *arguments])


@pytest.mark.parametrize(
    ("figure", "word"),
    [
        ("most = 1.2", "kept"), ("most = 1.1", "LOST"), ("most = 1.1\nnoise = 0.1", "kept"),
        ("least = 1.2", "kept"), ("least = 1.3", "LOST"), ("least = 1.3\nnoise = 0.1", "kept"),
    ],
)  # fmt: skip
def test_a_figure_is_kept_up_to_its_limit_and_noise(figure: str, word: str, tmp_path: Path) -> None:
    result = judged(tmp_path, figure=figure)
    assert (result.output.split()[:2], result.exit_code) == ([word, "ratio"], int(word == "LOST"))


@pytest.mark.parametrize(
    ("command", "bench"),
    [
        ("python -c 'raise SystemExit(3)'", ""),
        ("python -c 'print(1)'", ""),  # no such member
        ("python -c 'print(\"no JSON\")'", ""),
        (WRITES, 'file = "there-is-no-such-file"'),
    ],
)
def test_a_command_that_fails_or_writes_no_value_fails(command: str, bench: str, tmp_path: Path) -> None:
    result = judged(tmp_path, command=command, bench=bench)
    assert result.output.startswith("FAILED")
    assert result.exit_code == 1


def test_a_file_of_an_earlier_run_does_not_count(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("[0.5]")
    os.utime(old, (0, 0))
    assert judged(tmp_path, bench=f'file = "{old}"').output.startswith("FAILED")


def test_a_figure_without_its_data_set_is_not_run(tmp_path: Path) -> None:
    result = judged(tmp_path, bench='needs = "there-is-no-such-folder"')
    assert result.output.startswith("not run")
    assert result.exit_code == 0


def test_names_select_figures_and_unknown_names_are_refused(tmp_path: Path) -> None:
    assert judged(tmp_path, "ratio").exit_code == 1
    assert judged(tmp_path, "ration").exit_code == 2


def test_long_benches_run_with_all_only(tmp_path: Path) -> None:
    path = tmp_path / "goals.toml"
    judged(tmp_path)
    path.write_text(path.read_text().replace("minutes = 1\n", "minutes = 10\n"))
    assert CliRunner().invoke(main, ["--file", str(path)]).output == ""
    assert "LOST" in CliRunner().invoke(main, ["--file", str(path), "--all"]).output


def test_the_figures_of_the_repository_have_one_name_one_limit_and_a_page() -> None:
    figures = [figure for bench in benches(GOALS) for figure in bench.figures]
    assert len({figure.name for figure in figures}) == len(figures) >= 12
    assert all((figure.most is None) != (figure.least is None) for figure in figures)
    assert [figure.name for figure in figures if not (ROOT / figure.page).exists()] == []
    for figure in figures:
        compile(figure.value, figure.name, "eval")

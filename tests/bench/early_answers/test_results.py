from dataclasses import asdict, replace
from pathlib import Path

from bench.early_answers.goals import check_goals, least_coverage
from bench.early_answers.results import Results
from sim.early_answers.study import Study

STUDY = Study(windows=10, seed=3)


def row(study: Study) -> dict[str, object]:
    return asdict(study) | {"coverage": 0.95, "sampling_rate": 0.1, "oracle_rate": 0.1}


def test_a_run_goes_on_where_one_was_stopped(tmp_path: Path) -> None:
    path = tmp_path / "out" / "rows.json"
    studies = [STUDY, replace(STUDY, measure="sum"), replace(STUDY, delays="EC")]
    stopped = Results(path)
    assert stopped.missing("goals", studies) == studies
    stopped.add("goals", row(studies[1]))
    again = Results(path)
    assert again.missing("goals", studies) == [studies[0], studies[2]]
    again.add("goals", row(studies[0]))
    assert [r["measure"] for r in again.of("goals", studies)] == ["mean", "sum"]
    assert Results(path).missing("robustness", studies) == studies
    assert Results(path, fresh=True).missing("goals", studies) == studies


def test_rows_of_another_seed_or_number_of_windows_are_others(tmp_path: Path) -> None:
    results = Results(tmp_path / "rows.json")
    results.add("goals", row(STUDY))
    others = [replace(STUDY, seed=4), replace(STUDY, windows=20), replace(STUDY, confidence=0.9)]
    assert results.missing("goals", [STUDY, *others]) == others
    results.put("kmeans", [1])
    assert Results(tmp_path / "rows.json").get("kmeans", []) == [1]


def test_goals_that_are_missed_are_named() -> None:
    bad = row(replace(STUDY, scenario="burst", windows=400)) | {"coverage": 0.9, "sampling_rate": 0.14}
    missed = check_goals({"goals": [row(STUDY), bad]})
    assert [line.split(":")[0] for line in missed] == ["coverage 0.900", "rate 1.40 of the oracle's"]
    assert all("burst" in line for line in missed)
    assert 0.921 < least_coverage(0.95, 400) < 0.923

"""The figures of `bench.condor`: the paper's figures 10, 7b, 12 and 11, and COST."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt


def draw(result: dict[str, Any], directory: Path) -> Iterator[Path]:
    for part, figure in (
        ("scaling", _by_cores), ("windows", _windows), ("sources", _windows), ("skew", _bars), ("disorder", _bars),
        ("evaluation", _by_cores), ("cost", _cost),
    ):  # fmt: skip
        if part in result:
            fig, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
            figure(axes, result[part])
            axes.set_title(f"{part}, {result['rows']:,} records")
            path = directory / f"condor-{part}.png"
            fig.savefig(path, dpi=120)
            plt.close(fig)
            yield path


def _grouped(axes: Any, names: list[str], series: dict[str, list[float]]) -> None:
    width = 0.8 / len(series)
    for number, (label, values) in enumerate(series.items()):
        axes.bar([i + number * width for i in range(len(names))], [v / 1e6 for v in values], width, label=label)
    axes.set_xticks([i + 0.4 - width / 2 for i in range(len(names))], names, rotation=30, ha="right")
    axes.set_ylabel("million/s")
    axes.legend()


def _by_cores(axes: Any, by_cores: dict[str, dict[str, float]]) -> None:
    names = list(next(iter(by_cores.values())))
    _grouped(axes, names, {f"{cores} cores": [cells[n] for n in names] for cores, cells in by_cores.items()})


def _windows(axes: Any, by_cores: dict[str, dict[str, dict[str, float]]]) -> None:
    for label, cells in next(iter(by_cores.values())).items():
        axes.plot([int(w) for w in cells], [v / 1e6 for v in cells.values()], marker="o", label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylabel("million records/s")
    axes.legend()


def _bars(axes: Any, by_cores: dict[str, Any]) -> None:
    cells = next(iter(by_cores.values()))
    nested = {n: v if isinstance(v, dict) else {"records/s": v} for n, v in cells.items()}
    labels = list(next(iter(nested.values())))
    _grouped(axes, list(nested), {label: [held[label] for held in nested.values()] for label in labels})


def _cost(axes: Any, by_cores: dict[str, dict[str, float]]) -> None:
    first = next(iter(by_cores.values()))
    names = [n.removesuffix(", one thread") for n in first if n.endswith(", one thread")]
    series = {"one thread, no Spark": [first[f"{n}, one thread"] for n in names]}
    series |= {f"Spark, {cores} cores": [cells[f"{n}, spark"] for n in names] for cores, cells in by_cores.items()}
    _grouped(axes, names, series)

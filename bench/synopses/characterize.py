"""Characterisation of errors: quantiles over many trials by n and by size, for single, merged and windowed synopses.

As in Apache's datasketches-characterization, curves are quantiles of the signed error over trials, at the levels of 0,
±1, ±2 and ±3 standard deviations of a normal distribution; dashed lines are the bounds that the synopsis states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgewater.synopses import DDSketch, Distinct, HyperLogLog, Kll, Quantile, Rank

LEVELS = (0.00135, 0.02275, 0.15866, 0.5, 0.84134, 0.97725, 0.99865)
FORMS = ("single", "merged of 64", "window of 12 slices")


@dataclass(frozen=True)
class Curve:
    """A characterised error.

    Attributes:
        make: returns a synopsis for a size and a trial.
        error: returns the signed error of a synopsis of the values.
        stated: returns the half width of the interval, or the bound, for a size.
    """

    name: str
    label: str
    make: Callable[[int, int], Any]
    draw: Callable[[np.random.Generator, int], np.ndarray]
    error: Callable[[Any, np.ndarray], float]
    stated: Callable[[int], float | None]
    sizes: tuple[int, ...]
    size: int
    size_label: str


def _distinct_error(synopsis: Any, values: np.ndarray) -> float:
    return float(synopsis.query(Distinct()).value / len(np.unique(values)) - 1)


def _rank_error(synopsis: Any, values: np.ndarray) -> float:
    x = float(np.median(values))
    return float(synopsis.query(Rank(x)).value - np.mean(values <= x))


def _quantile_error(synopsis: Any, values: np.ndarray) -> float:
    truth = np.sort(values)[int(0.9 * (len(values) - 1))]
    return float(synopsis.query(Quantile(0.9)).value / truth - 1)


CURVES = (
    Curve("hyperloglog", "relative error of distinct values", lambda p, t: HyperLogLog(p, seed=t),
          lambda rng, n: rng.integers(0, 1 << 62, n), _distinct_error, lambda p: 2 * 1.04 / math.sqrt(1 << p),
          (6, 7, 8, 9, 10, 11, 12, 13), 11, "precision (2^p registers)"),
    Curve("kll", "error of the median's rank", lambda k, t: Kll(k, seed=t, source=t),
          lambda rng, n: rng.normal(0, 1, n), _rank_error, lambda k: None,
          (16, 32, 64, 128, 256, 512), 200, "k"),
    Curve("ddsketch", "relative error of the 90 % quantile", lambda b, t: DDSketch(1 / b),
          lambda rng, n: rng.lognormal(0, 2, n), _quantile_error, lambda b: 1 / b,
          (5, 10, 20, 50, 100, 200), 100, "1 / accuracy"),
)  # fmt: skip


def built(curve: Curve, size: int, values: np.ndarray, trial: int, form: str) -> tuple[Any, np.ndarray]:
    """Returns a synopsis (single, merged, or of a window of the latest 12 of 24 slices) and its values."""
    if form == "single":
        one = curve.make(size, trial)
        one.update(values)
        return one, values
    parts = np.array_split(values, 64) if form.startswith("merged") else np.array_split(values, 24)[12:]
    made = []
    for number, part in enumerate(parts):
        made.append(curve.make(size, trial))
        if hasattr(made[-1].stack, "source"):
            made[-1].stack.source = trial * 64 + number
        made[-1].update(part)
    return made[0].merge_many(made[1:]), np.concatenate(parts)


def quantiles_of_errors(curve: Curve, size: int, n: int, form: str, trials: int) -> list[float]:
    errors = []
    for trial in range(trials):
        values = curve.draw(np.random.default_rng((trial, n)), n)
        synopsis, held = built(curve, size, values, trial, form)
        errors.append(curve.error(synopsis, held))
    return [float(q) for q in np.quantile(errors, LEVELS)]


def characterize(
    trials: int, largest: int, images: Path, points: int = 9, curves: Sequence[Curve] = CURVES
) -> list[dict[str, Any]]:
    """Measures curves and plots each to `images`/synopses-<name>.svg."""
    ns = [int(n) for n in np.unique(np.geomspace(64, largest, points).round())]
    found = []
    for curve in curves:
        against_n = {form: [quantiles_of_errors(curve, curve.size, n, form, trials) for n in ns] for form in FORMS}
        middle = min(8_000, largest)
        against_size = {
            form: [quantiles_of_errors(curve, size, middle, form, trials) for size in curve.sizes] for form in FORMS
        }
        found.append({"synopsis": curve.name, "levels": LEVELS, "trials": trials, "n": ns, "sizes": curve.sizes,
                      "against_n": against_n, "against_size": against_size, "n_of_sizes": middle})  # fmt: skip
        draw(curve, found[-1], images / f"synopses-{curve.name}.svg")
    return found


def draw(curve: Curve, found: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.fonttype"] = "none"
    mpl.rcParams["svg.hashsalt"] = "edgewater"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, len(FORMS), figsize=(12, 6), sharey="row", layout="constrained")
    rows = (("n", found["n"], found["against_n"]), (curve.size_label, found["sizes"], found["against_size"]))
    for row, (label, xs, by_form) in zip(axes, rows, strict=True):
        for axis, form in zip(row, FORMS, strict=True):
            curves = np.array(by_form[form]).T
            for level, ys in zip(LEVELS, curves, strict=True):
                deviations = abs(LEVELS.index(level) - 3)
                axis.plot(xs, ys, color=f"C{deviations}", lw=1.2, label=f"{level:.2%}")
            sizes = [curve.size] * len(xs) if label == "n" else list(xs)
            stated = [curve.stated(size) for size in sizes]
            if None not in stated:
                for sign in (1, -1):
                    axis.plot(xs, [sign * s for s in stated], "k--", lw=0.8)  # type: ignore[operator]
            axis.set_xscale("log")
            axis.set_xlabel(label)
            axis.set_title(form, fontsize=10)
            axis.grid(alpha=0.3)
        row[0].set_ylabel(curve.label)
    axes[0][-1].legend(fontsize=7, title="quantile of the error", title_fontsize=7)
    figure.suptitle(f"{curve.name}: {found['trials']} trials a point; below, n = {found['n_of_sizes']:,}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)

"""How often the sample of a window is too small, with samples that are topped up and without:
`python -m bench.early_answers.top_up [--load common] [--seconds 120] [--seed 2]`.

Three production edge cores and the production ledger run in virtual time. Each edge gets 1,500 or 4,500 records/s for a
mean of an expensive function, 5 % at 95 %. Windows are 1 s long. The load changes in a tenth of the windows: at all
edges at once (`common`), at each edge for itself (`single`), or for one window of one edge (`burst`). With `pareto`
and `late`, it changes at all edges. Values are then Pareto with the exponent 2.1, or delays have a mean of 400 ms
instead of 80.
"""

from __future__ import annotations

import click
import numpy as np

from center.early import RATES_EVERY_MS, EdgeSamplingController, SamplingPlan, SamplingRequirement, plans_differ
from center.early.trigger import SAMPLE_TOO_SMALL
from edge.core.events import SamplingSet
from edge.core.streams import StreamSpec
from edgewater.answers import Phase
from edgewater.base.plugins import PluginOrigin
from edgewater.base.streams import LIVE, EdgeId
from edgewater.model import record_functions
from edgewater.model.record_functions import RecordFunction, RecordFunctions
from edgewater.synopses import FloatArray
from edgewater.wire import SamplingReason
from tests.center import accuracy_world as worlds
from tests.cores import open_core

LOADS = ("common", "single", "burst", "pareto", "late")
LOW, HIGH = 1_500.0, 4_500.0
WARM_UP = 12
"""The windows that are not counted."""


def rates(load: str, seconds: int, seed: int, edge: int) -> FloatArray:
    rng = np.random.default_rng([seed, edge if load in ("single", "burst") else 99])
    changes = rng.random(seconds) < 0.1
    return np.where(changes if load == "burst" else np.cumsum(changes) % 2 == 1, HIGH, LOW)


def site(load: str, seconds: int, seed: int, edge: int) -> worlds.Site:
    rng = np.random.default_rng([seed, edge, 7])
    counts = rng.poisson(rates(load, seconds, seed, edge))
    born = np.sort(np.repeat(np.arange(seconds), counts) + rng.random(counts.sum())) * 1_000
    arrival = born + rng.exponential(400.0 if load == "late" else 80.0, len(born))
    uniform, order = rng.random(len(born)), np.argsort(arrival, kind="stable")
    values = 5.0 * uniform ** (-1 / 2.1) if load == "pareto" else rng.gamma(2.0, 5.0, len(born))
    core = open_core(
        StreamSpec(worlds.COLUMNS, LIVE, worlds.DISORDER_MS, 3_000), source="f", number=edge + 1 + 100 * seed
    )
    born_ms, arrival_ms = (worlds.BEGIN_MS + np.ceil(each[order]).astype(np.int64) for each in (born - 1, arrival))
    return worlds.Site(f"e{edge}", core, born_ms, arrival_ms, values[order], group=np.zeros(len(born), np.int64))


def measure(load: str, seconds: int, seed: int, *, is_topped_up: bool) -> str:
    sites = [site(load, seconds + 6, seed, edge) for edge in range(3)]
    greatest = max(float(each.values.max()) for each in sites)
    accuracy = {"error": "5%", "measure": "total", "substream": "500ms", "range": [0, greatest]}
    world = worlds.World(worlds.spec({"total": "mean(score(x))"}, accuracy=accuracy), sites)
    controllers = [EdgeSamplingController() for _ in sites]
    plans: dict[EdgeId, SamplingPlan] = {}

    def each(now_ms: int) -> None:
        nonlocal plans
        if now_ms % RATES_EVERY_MS == 0:
            planned = world.ledger.needed_plans()[worlds.REF]
            plans = planned if plans_differ(plans, planned) else plans
        for edge, controller in zip(sites, controllers, strict=True) if now_ms % 1_000 == 0 else ():
            plan = plans.get(EdgeId(edge.name), SamplingPlan())
            needed = SamplingRequirement(worlds.REF, plan.rate, True, plan.records * is_topped_up)
            for m in controller.on_heartbeat(0, 1e9, 0.0, (needed,), 0.1):
                reason = SamplingReason.from_number(m.reason)
                edge.core.handle(SamplingSet(worlds.REF, m.rate, m.clock_offset_ms, reason, m.expected_records))

    world.run(seconds + 4, each)
    answers = worlds.first_answers(world.answers, WARM_UP)
    early = [(a, a.prediction) for a in answers if a.phase is Phase.EARLY and a.prediction is not None]
    stated = [(a, p) for a, p in early if np.isfinite([p.lower, p.upper]).all()]
    containing = sum(p.lower <= world.truth(a.window_start_ms, "mean") <= p.upper for a, p in stated)
    too_small = sum(p.reason == SAMPLE_TOO_SMALL for _, p in early)
    processed = sum(p.sampled for _, p in early) / sum(p.arrived for _, p in early)
    wait_ms = np.mean([worlds.wait_ms(a) for a, _ in early])
    return (
        f"{len(early)} early, {too_small} too small, {containing} of {len(stated)} intervals held, "
        f"{100 * processed:.1f} % processed, wait {wait_ms:.0f} ms, {world.bytes:,} bytes"
    )


@click.command()
@click.option("--load", type=click.Choice(LOADS), default="common", show_default=True)
@click.option("--seconds", default=120, show_default=True, type=click.IntRange(20))
@click.option("--seed", default=2, show_default=True, type=click.IntRange(0))
def main(load: str, seconds: int, seed: int) -> None:
    """Measure how often samples are too small."""
    functions = RecordFunctions(list)
    score = RecordFunction("score", ("float64",), "float64", lambda column: column)
    functions._register((score,), PluginOrigin("bench 1.0", "score"))
    record_functions.INSTALLED = functions
    for is_topped_up in (False, True):
        text = measure(load, seconds, seed, is_topped_up=is_topped_up)
        click.echo(f"{load}, {'topped up' if is_topped_up else 'not topped up'}: {text}")


if __name__ == "__main__":
    main()

"""An edge that loses its state: what it had counted and not reported is gone, or is counted again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from bench.truth.arrivals import LateRecords
from center.ledger import EdgesChanged, Emission, FrameSummary
from edgewater.answers import Phase
from edgewater.arrivals.targets import AccuracyTarget
from sim.early_answers import engine
from sim.early_answers.edges import SimulatedEdge

LOST_WINDOW, WINDOWS = 10, 18


class LostState(engine.EarlyAnswerSimulation):
    """The first edge loses its state within a window, and is away for a while; its records wait for it meanwhile."""

    away_ms, back_ms, emissions = 0, 1 << 62, list[Emission]()

    def _report(self) -> None:
        if self.back_ms == 1 << 62 and self.now_ms >= self._start(LOST_WINDOW) + 430:
            self.back_ms = self.now_ms + self.away_ms
        if self.incarnation == "i" and self.now_ms >= self.back_ms:
            self._readers[0] = SimulatedEdge(1, self.schedule, grouped=False, has_values=True)
            records = [engine._record(edge) for edge in self.edges]
            records[0] = replace(records[0], incarnation="j", incarnations=2, state_lost_at_ms=self.now_ms)
            self.incarnation = "j"
            for query in self._queries:
                self._answer(query, query.ledger.handle(EdgesChanged(tuple(records))))
        super()._report()

    incarnation = "i"

    @property
    def _is_away(self) -> bool:
        return self.incarnation == "i" and self.back_ms < 1 << 62

    def _is_silent(self, edge: int) -> bool:
        return edge == 0 and self._is_away

    def _read(self, before_ms: int) -> None:
        if self._is_away:
            arrival_ms, _, source, *_ = self._pending
            arrival_ms = np.where((source == 0) & (arrival_ms < self.back_ms), self.back_ms, arrival_ms)
            order = np.argsort(arrival_ms, kind="stable")
            self._pending = [arrival_ms[order], *(column[order] for column in self._pending[1:])]
            self._positions = self._positions[order]
        super()._read(before_ms)

    def _fact(self, edge: int) -> FrameSummary:
        return replace(super()._fact(edge), incarnation=self.incarnation if edge == 0 else "i")

    def _answer(self, query: engine._Answers, emissions: Sequence[Emission]) -> None:
        self.emissions = [*self.emissions, *emissions]
        super()._answer(query, emissions)


@pytest.mark.slow
@pytest.mark.parametrize(
    "away_ms", [pytest.param(0, marks=pytest.mark.full), 700, pytest.param(2_500, marks=pytest.mark.full)]
)
def test_windows_that_were_open_when_an_edge_lost_its_state_have_no_bounds_and_others_hold(away_ms: int) -> None:
    records = LateRecords("exponential", windows=WINDOWS, seed=100)
    run = LostState(
        records, AccuracyTarget(0.05, 0.95), "sum", 0.0, substream_ms=200, sampling=False, disorder_ms=4_000
    )
    run.away_ms = away_ms
    outcomes = run.run()
    begun = LOST_WINDOW + (430 + away_ms) // 1_000
    early = {(e.window_start_ms - run._origin_ms) // 1_000: e for e in run.emissions if e.phase is Phase.EARLY}
    for window in range(LOST_WINDOW, begun + 1):
        prediction = early[window].prediction
        assert prediction is not None and not prediction.bounded
        assert early[window].codes()
    after = [o for o in outcomes[begun + 1 :] if o.early and np.isfinite(o.half_width[0])]
    assert len(after) >= 3
    assert sum(abs(o.estimate[0] - o.truth[0]) <= o.half_width[0] for o in after) >= len(after) - 1

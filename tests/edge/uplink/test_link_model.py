"""What the model says of links, and whether it is so."""

from __future__ import annotations

import numpy as np
import pytest

from edge.uplink.link_model import LOW, MID, LinkModel
from sim.budgets.link import SimulatedLink
from tests.cells import at_night
from tests.edge.uplink.link_world import Sender

RATE = 4_300.0
"""Between two hypotheses."""
WINDOWS = 14


def bucket(depth: float, delay_ms: float, rate: float = RATE, **settings: object) -> SimulatedLink:
    return SimulatedLink(rate, latency_ms=delay_ms, bucket_bytes=depth, jitter_ms=3, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("delay_ms", [1.0, 50.0, 300.0, 600.0])
@pytest.mark.parametrize("depth", [0.0, 1_600.0, 65_536.0])
@pytest.mark.parametrize("demand", [20_000, 60_000])
def test_nine_of_ten_frames_arrive_by_the_time_that_is_stated(depth: float, delay_ms: float, demand: int) -> None:
    sender = Sender(bucket(depth, delay_ms), lambda _: demand).run(WINDOWS)
    assert sender.calibration(20.0) >= 0.85
    stated = sender.flow.stated_bytes_s
    if depth == 65_536.0 and demand == 20_000:
        assert stated == 0.0, "the bucket was never empty: nobody can know"
        assert sender.flow.forecast(sender.now).low_bytes_s <= RATE
    else:
        assert stated == pytest.approx(RATE, rel=0.05)
    if demand == 60_000:
        assert sender.use(20.0, 140.0) >= 0.95 * RATE, "the link is used"


def test_two_links_that_give_the_same_arrivals_give_the_same_statement() -> None:
    """With a bucket of 64 KiB and a few KB a window, 4 KiB/s and 1 MiB/s cannot be told apart."""
    slow, fast = (Sender(bucket(65_536.0, 50.0, rate), lambda _: 20_000).run(WINDOWS) for rate in (4_096.0, 2.0**20))
    assert slow.flow.stated_bytes_s == fast.flow.stated_bytes_s == 0.0
    low, mid = slow.flow.forecast(slow.now), fast.flow.forecast(fast.now)
    assert low.low_bytes_s == pytest.approx(mid.low_bytes_s, rel=0.01)
    assert low.low_bytes_s < 4_096.0 < low.mid_bytes_s


@pytest.mark.slow
@pytest.mark.parametrize("demand", [15_000, *at_night(60_000)])
def test_a_rate_that_halves_is_believed_after_a_few_messages(demand: int) -> None:
    halved = bucket(1_600.0, 50.0, trace=((0.0, 1.0), (62_000.0, 0.5)))
    sender = Sender(halved, lambda _: demand).run(8)
    assert sender.flow.model.rate_bytes_s(MID) == pytest.approx(RATE / 2, rel=0.1)
    sender.run(6)
    assert sender.calibration(80.0) >= 0.85


def test_other_traffic_makes_predictions_later_and_not_false() -> None:
    sender = Sender(bucket(1_600.0, 50.0), lambda _: 15_000, cross_bytes_s=1_000.0).run(30)
    assert sender.calibration(20.0) >= 0.85


@pytest.mark.parametrize("pause_s", [0.02, 0.2])
def test_pauses_of_the_center_make_predictions_later_and_not_the_rate_another(pause_s: float) -> None:
    sender = Sender(bucket(1_600.0, 1.0), lambda _: 20_000, pause_s=pause_s).run(WINDOWS)
    assert sender.calibration(20.0) >= 0.85
    assert sender.flow.stated_bytes_s == pytest.approx(RATE, rel=0.05)


def test_a_policer_that_drops_is_met_below_its_rate() -> None:
    policer = bucket(8_000.0, 50.0, 16_384.0, queue_bytes=0.0)
    sender = Sender(policer, lambda _: 20_000).run(WINDOWS)
    assert sender.calibration(20.0) >= 0.8
    assert sender.flow.model.rate_bytes_s(LOW) <= 1.05 * 16_384.0


def test_a_wide_link_is_not_taken_for_a_narrow_one_although_the_center_pauses() -> None:
    pauses = lambda rng: 0.02 + (0.5 if rng.random() < 0.05 else 0.0)  # noqa: E731
    sender = Sender(SimulatedLink(1e8, latency_ms=5), lambda _: 2e6, hold_s=pauses).run(WINDOWS)
    assert sender.flow.model.rate_bytes_s(MID) > 1e6
    assert sender.flow.stated_bytes_s == 0.0 or sender.flow.stated_bytes_s > 1e6


def test_tcp_sends_ten_packets_in_the_first_round_trip_after_idle_time() -> None:
    model = LinkModel()
    for seq in range(30):
        model.sent(seq, 100_000, seq / 10)
        model.arrived(seq, seq / 10 + 0.01)
    at_once, later = (model.bytes_within(60.0, after_s, MID, 0.6) for after_s in (0.5, 1.3))
    assert at_once == pytest.approx(14_480.0)
    assert later == pytest.approx(7 * 14_480.0)
    assert model.bytes_within(60.0, 0.5, MID) > 1e5


def test_what_a_lost_session_has_sent_has_occupied_the_link() -> None:
    sent, lost = LinkModel(), LinkModel()
    sent.sent(None, 50_000, 0.0)
    lost.sent(1, 50_000, 0.0)
    lost.begin_session()
    for model in (sent, lost):
        model.sent(2, 1_000, 0.1)
        model.arrived(2, 12.0)
    assert lost.rate_bytes_s(MID) == sent.rate_bytes_s(MID)
    assert lost.bytes_within(12.0, 1.0, MID) == sent.bytes_within(12.0, 1.0, MID)


def test_a_quantile_of_more_weight_promises_less() -> None:
    model, rng = LinkModel(), np.random.default_rng(3)
    for seq in range(40):
        model.sent(seq, 2_000, float(seq))
        model.arrived(seq, seq + float(rng.uniform(0.0, 0.4)))
        for after_s in (0.5, 2.0):
            assert model.bytes_within(seq + 0.9, after_s, LOW) <= model.bytes_within(seq + 0.9, after_s, MID)
        assert model.rate_bytes_s(LOW) <= model.rate_bytes_s(MID)

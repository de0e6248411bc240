"""Edges of one link have equal shares of what it carries; edges that come and go change them within a bounded time."""

from __future__ import annotations

import pytest

from center.budgets import LEASE_MS, LinkDivision
from edgewater.base.streams import EdgeId
from edgewater.model.link_forecast import LinkRecord

A, B, C = (EdgeId(name) for name in "abc")


class Gateways:
    """Two gateways over one catalog."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000
        self.both = tuple(LinkDivision(lambda: self.now_ms) for _ in range(2))
        self.stored: dict[EdgeId, LinkRecord] = {}

    def shares(self) -> dict[EdgeId, float]:
        """Returns the shares that are sent."""
        self.now_ms += 1_000
        for each in self.both:
            self.stored |= {record.edge: record for record in each.take_changed()}
        sharing = [r for r in self.stored.values() if r.link and r.until_ms > self.now_ms]
        return {edge: round(share) for each in self.both for edge, share in each.divide(sharing)}


def test_the_largest_estimate_is_divided_over_gateways_and_an_edge_alone_has_all_of_its_link() -> None:
    world = Gateways()
    first, second = world.both
    for gateway, edge, link in ((first, A, "ship"), (second, B, "ship"), (second, C, "")):
        gateway.begin(edge, link)
        gateway.stated(edge, 4_000.0 if edge == A else 1_500.0, 5_000.0, {})
    assert world.shares() == {A: 2_000, B: 2_000}
    first.stated(A, 3_900.0, 5_000.0, {})
    second.stated(B, 2_100.0, 5_000.0, {})
    assert world.shares() == {}, "small changes change nothing"
    second.begin(C, "ship")
    assert world.shares() == {A: pytest.approx(1_333), B: pytest.approx(1_333), C: pytest.approx(1_333)}


@pytest.mark.parametrize("says_goodbye", [False, True])
def test_the_share_of_an_edge_that_is_cut_goes_to_the_others_after_its_lease(says_goodbye: bool) -> None:
    world = Gateways()
    first, second = world.both
    first.begin(A, "ship")
    second.begin(B, "ship")
    first.stated(A, 4_000.0, 4_000.0, {})
    assert world.shares() == {A: 2_000, B: 2_000}
    if says_goodbye:
        second.end(B)
    begun_ms, given = world.now_ms, dict[EdgeId, float]()
    while not given:
        first.heard(A, 1_000)
        given = world.shares()
    assert given == {A: 0} and LEASE_MS - 2_000 <= world.now_ms - begun_ms <= LEASE_MS + 2_000
    second.begin(B, "ship")
    assert world.shares() == {A: 2_000, B: 2_000}, "it comes back"


def test_a_link_that_has_become_slower_is_divided_anew_after_a_minute() -> None:
    world = Gateways()
    gateway = world.both[0]
    for edge in (A, B):
        gateway.begin(edge, "ship")
        gateway.stated(edge, 4_000.0, 4_000.0, {})
    assert world.shares() == {A: 2_000, B: 2_000}
    given = dict[EdgeId, float]()
    for _ in range(62):
        for edge in (A, B):
            gateway.heard(edge, 1_000)
            gateway.stated(edge, 1_000.0, 1_000.0, {})
        given |= world.shares()
    assert given == {A: 500, B: 500}


def test_while_nothing_is_known_of_a_link_it_is_not_divided() -> None:
    world = Gateways()
    for edge in (A, B):
        world.both[0].begin(edge, "ship")
    assert world.shares() == {}

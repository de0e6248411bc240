"""The watermarks of sites, and the watermark of the stream."""

from __future__ import annotations

from collections.abc import Sequence

from center.batch.slicing.families import MAX_TIME_MS
from edgewater.model.errors import InvalidRequest

NO_WATERMARK = -2 * MAX_TIME_MS
"""The value of a watermark before it is reported."""


class SiteWatermarks:
    """Computes the stream's watermark: the least watermark of the live sites. It never decreases.

    A site is an edge or a partition. A site in `sites` is live from the beginning. Any other site is live from its
    first record or watermark on. A live site holds the stream back until it advances, becomes idle or is retired.

    Args:
        sites: names of sites that are expected from the beginning.
        idle_after_ms: a site whose watermark is this far behind the most advanced watermark counts as idle. A site
            without a watermark is measured from the first watermark of any site. None if no site becomes idle in this
            way.
    """

    def __init__(self, sites: Sequence[str] = (), idle_after_ms: int | None = None) -> None:
        if idle_after_ms is not None and idle_after_ms <= 0:
            raise InvalidRequest("idle_after_ms", idle_after_ms, "a positive number of ms, or None")
        self.idle_after_ms = idle_after_ms
        self.sites = dict.fromkeys(sites, NO_WATERMARK)
        self.idle: set[str] = set()
        self.watermark = NO_WATERMARK
        self.first: int | None = None  # first watermark of any site

    def heard(self, site: str) -> None:
        self.sites.setdefault(site, NO_WATERMARK)
        self.idle.discard(site)

    def advance(self, site: str, watermark_ms: int) -> int:
        """Advances a site's watermark, and returns the stream's watermark. A watermark behind the site's own has no
        effect.
        """
        accepted = "a whole number of ms within ±2^60"
        if isinstance(watermark_ms, bool) or not isinstance(watermark_ms, int):
            raise InvalidRequest("watermark_ms", watermark_ms, accepted)
        if not -MAX_TIME_MS <= watermark_ms <= MAX_TIME_MS:
            raise InvalidRequest("watermark_ms", watermark_ms, accepted)
        self.heard(site)
        self.first = watermark_ms if self.first is None else self.first
        self.sites[site] = max(self.sites[site], watermark_ms)
        return self._least()

    def set_idle(self, site: str) -> int:
        self._require(site)
        self.idle.add(site)
        return self._least()

    def retire(self, site: str) -> int:
        self._require(site)
        del self.sites[site]
        self.idle.discard(site)
        return self._least()

    def _require(self, site: str) -> None:
        if site not in self.sites:
            known = ", ".join(sorted(self.sites)) or "none"
            raise InvalidRequest("site", site, f"a known site: {known}")

    def _least(self) -> int:
        live = [w for site, w in self.sites.items() if site not in self.idle]
        if live and self.idle_after_ms is not None:
            begun = NO_WATERMARK if self.first is None else self.first
            live = [w for w in live if max(w, begun) >= max(live) - self.idle_after_ms]
        self.watermark = max(self.watermark, min(live, default=NO_WATERMARK))
        return self.watermark

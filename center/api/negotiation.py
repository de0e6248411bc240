"""Content negotiation and conditional requests (RFC 9110)."""

from __future__ import annotations

from collections.abc import Sequence

from center.api.problems import HttpProblem
from edgewater.model.table_texts import ARROW, CSV, JSON

SQL = "application/sql"
FORMATS = {"json": JSON, "csv": CSV, "arrow": ARROW}
"""The forms of tables and answers, by value of the parameter `format`."""


def negotiate(accept: str | None, named: str | None) -> str:
    """Returns the form of a response.

    Args:
        accept: the ``Accept`` header. Of equally preferred forms, the first one in `FORMATS` is returned.
        named: the parameter `format`, which overrides the header.

    Raises:
        HttpProblem: not-acceptable, if the header accepts none of the forms.
    """
    if named is not None or not accept or not accept.strip():
        return FORMATS[named or "json"]
    ranges = [_media_range(part) for part in accept.split(",") if part.strip()]
    best = max(FORMATS.values(), key=lambda form: _quality(form, ranges))
    if _quality(best, ranges) == 0:
        raise HttpProblem("not-acceptable", f"Accept: {accept} includes none of {', '.join(FORMATS.values())}")
    return best


def _media_range(part: str) -> tuple[str, float]:
    media_type, *parameters = (p.strip() for p in part.lower().split(";"))
    quality = 1.0
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                quality = min(max(float(value), 0.0), 1.0)
            except ValueError:
                quality = 0.0
    return media_type, quality


def _quality(form: str, ranges: Sequence[tuple[str, float]]) -> float:
    """Returns the quality value of the most specific range that includes the form."""
    by_specificity = (form, form.partition("/")[0] + "/*", "*/*")
    for candidate in by_specificity:
        for media_type, quality in ranges:
            if media_type == candidate:
                return quality
    return 0.0


def matches(if_none_match: str | None, etag: str) -> bool:
    """Returns whether an ``If-None-Match`` header names this entity tag (weak comparison)."""
    if if_none_match is None:
        return False
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return "*" in tags or etag.removeprefix("W/") in tags

"""Content negotiation and conditional requests (RFC 9110)."""

from __future__ import annotations

from collections.abc import Sequence

from center.api.problems import HttpProblem
from edgewater.model.table_texts import ARROW, CSV, JSON

SQL = "application/sql"
ANSWER_FORMS = (JSON, CSV, ARROW)
FORMATS = {"json": JSON, "csv": CSV, "arrow": ARROW}
"""By value of the parameter `format`."""


def negotiate(accept: str | None, forms: Sequence[str] = ANSWER_FORMS) -> str:
    """Returns the form that an ``Accept`` header prefers; of equally preferred forms, the first one in `forms`.

    Raises:
        HttpProblem: not-acceptable, if the header accepts none of the forms.
    """
    if not accept or not accept.strip():
        return forms[0]
    ranges = [_media_range(part) for part in accept.split(",") if part.strip()]
    best = max(forms, key=lambda form: _quality(form, ranges))
    if _quality(best, ranges) == 0:
        raise HttpProblem("not-acceptable", f"Accept: {accept} includes none of {', '.join(forms)}")
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

"""Answers as tests read them."""

from __future__ import annotations

import json
from typing import Any

from center import serving


def render(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Returns the JSON of `center.serving.render`."""
    answer: dict[str, Any] = json.loads(serving.render(*args, **kwargs))
    return answer

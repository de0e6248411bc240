"""An error budget beside an accuracy: predictions are the same, edges send less, and later answers keep both."""

from __future__ import annotations

WINDOWS = 30
SHARES = (8.0, 4.0, 2.0, 1.0)
"""Of the records, by group: each group has enough records for an interval."""

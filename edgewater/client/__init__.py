"""A client of a center's API, for scripts, notebooks and programs: the extra `client`.

    from edgewater.client import Center

    with Center("http://127.0.0.1:7480") as center:
        query = center.register(spec)
        answer = query.latest()
        answer["bytes"].interval

The client imports neither the center nor Spark nor the agent.
"""

from edgewater.client.answers import Answer, Answers, Column, Gap, PackageMissing, Progress
from edgewater.client.center import Center, Query
from edgewater.client.interval import Interval, Undecided
from edgewater.client.requests import RequestRefused, Unreachable, WaitTimeout

__all__ = [
    "Answer", "Answers", "Center", "Column", "Gap", "Interval", "PackageMissing",
    "Progress", "Query", "RequestRefused", "Undecided", "Unreachable", "WaitTimeout",
]  # fmt: skip

"""The client against the API behind a real server, over the real stores."""

from tests.center.api.conftest import desk, two_hours

__all__ = ["desk", "two_hours"]

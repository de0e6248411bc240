"""The release and the format of a state on disk.

Edges and centers record both in their state. If a state has another format, it is refused and not changed. The error
names the release that wrote it.
"""

from __future__ import annotations

from importlib.metadata import version

from edgewater.base.errors import IncompatibleState

RELEASE = version("edgewater")


def require_format(state: str, written: tuple[int, str] | None, reads: int, remedy: str) -> None:
    """Checks that this release can read a state. Called before any other part of the state is read.

    Args:
        state: the name of the state, such as ``state_dir /var/lib/edgewater``.
        written: format of the state, and the last release that wrote it; None if the state does not record them.
        reads: the only format that this release reads and writes.
        remedy: what a user can do instead of going back to the other release.

    Raises:
        IncompatibleState: the state has another format.
    """
    if written is not None and written[0] == reads:
        return
    found = "a release that records no format" if written is None else f"Edgewater {written[1]} in format {written[0]}"
    raise IncompatibleState(
        f"{state}: it was written by {found}, and Edgewater {RELEASE} reads format {reads}. It is not damaged. Go back "
        f"to the release that wrote it, or {remedy}"
    )

"""The reference of the commands is what the commands say."""

from tests.docs.cli_reference import PAGE, render


def test_the_reference_has_the_help_of_every_command() -> None:
    assert PAGE.read_text() == render(), "python -m tests.docs.cli_reference renews the page"

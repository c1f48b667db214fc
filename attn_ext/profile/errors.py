"""What a user can get wrong."""

from __future__ import annotations


class InputError(ValueError):
    """What was given cannot be used. The text is one line: what, what was expected, what came.

    The command prints it and exits with status 2.
    """

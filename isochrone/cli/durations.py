"""Durations of options: seconds, or a number with a unit."""

import re
from typing import Final

import click

_UNITS_S: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)", re.ASCII)


def duration_s(text: str) -> float:
    """Return the seconds of 90, 90s, 15m, 1h or 30d. Raises click.BadParameter."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise click.BadParameter(
            f"cannot read the duration {text[:40]!r}: write seconds (90), or a number with a unit:"
            " 90s, 15m, 1h, 30d"
        )
    return float(found[1]) * _UNITS_S[found[2]]

"""Durations of options: seconds, or a number with a unit."""

import re
from typing import Final

import click

_UNITS_S: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)", re.ASCII)


class Duration(click.ParamType):
    """A duration in seconds, written as 90, 90s, 15m, 1h or 30d."""

    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the seconds; fail with the ways to write it."""
        found = _DURATION.fullmatch(str(value))
        if found is None:
            self.fail(
                f"cannot read the duration {str(value)[:40]!r}: write seconds (90), or a number"
                " with a unit: 90s, 15m, 1h, 30d"
            )
        return float(found[1]) * _UNITS_S[found[2]]

"""How this router was built: its sources as they are, or its hot path compiled (setup.py)."""

import sys

from router import pipeline


def is_compiled() -> bool:
    """Say whether the hot path runs compiled."""
    return not str(pipeline.__file__).endswith(".py")


def facts() -> dict[str, str]:
    """Return what tells one build from another, for the log and the metrics."""
    return {
        "compiled": "yes" if is_compiled() else "no",
        "python": ".".join(str(part) for part in sys.version_info[:3]),
    }

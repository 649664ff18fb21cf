"""How this router was built: as plain Python, or with a compiled request path (setup.py)."""

import sys

from router import pipeline


def is_compiled() -> bool:
    """Return whether the request path is compiled."""
    return not str(pipeline.__file__).endswith(".py")


def facts() -> dict[str, str]:
    """Return the build's properties, for the log and the metrics."""
    return {
        "compiled": "yes" if is_compiled() else "no",
        "python": ".".join(str(part) for part in sys.version_info[:3]),
    }

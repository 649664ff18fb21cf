"""Names for requests whose clients gave none."""

from isochrone.wire.ids import BootId


class RequestIds:
    """Makes request ids: this life of the router, and a number."""

    def __init__(self, boot_id: BootId) -> None:
        """Begin at one."""
        self._prefix = f"req-{boot_id}-"
        self._count = 0

    def __call__(self) -> str:
        """Return the next."""
        self._count += 1
        return f"{self._prefix}{self._count}"

"""A fleet as it runs outside of the demo: with TLS between its parts."""

from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.system.harness import CITIES, Fleet, node_process


class TlsFleet(Fleet):
    """Schedulers and nodes serve TLS, and nodes ask for a certificate."""

    def __init__(self, folder: Path, nodes_in_pop: int = 1) -> None:
        """Prepare `nodes_in_pop` nodes in each PoP."""
        super().__init__(folder)
        self._private: dict[str, int] = {}
        for name in ("a", "b"):
            self.settings[f"scheduler-{name}"] = {"control_tls": True}
        for pop in CITIES:
            self.settings[f"router-{pop}"] = {"node_tls": True}
            for number in range(1, nodes_in_pop + 1):
                self._add_node(node_process(pop, number))

    def _add_node(self, name: str) -> None:
        port = self.ports.setdefault(name, free_port())
        self._private[name] = free_port()
        settings: dict[str, Any] = {
            "listen_tls": True,
            "address": f"https://127.0.0.1:{port}",
            "private_host": "127.0.0.1",
            "private_port": self._private[name],
        }
        self.settings[name] = settings

    def schedulers(self) -> str:
        return super().schedulers().replace("http:", "https:")

    def url(self, name: str) -> str:
        # A node's data-plane server asks for a certificate.
        return f"http://127.0.0.1:{self._private.get(name, self.ports[name])}"

    async def is_up(self, name: str, path: str) -> bool:
        return await super().is_up(name, "/metrics" if name in self._private else path)

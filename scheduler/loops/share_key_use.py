"""Tells every router, each second, what keys with limits have used at the others."""

import asyncio
from dataclasses import dataclass
from typing import Final

from isochrone.wire.client_keys.key_use import KEY_USE, FleetKeyUse
from scheduler.state.key_use_exchange import KeyUseExchange
from scheduler.state.peers.peer_registry import PeerRegistry

SHARE_KEY_USE_S: Final = 1.0


@dataclass(eq=False)
class ShareKeyUse:
    """Sends nothing while no such key is in use."""

    exchange: KeyUseExchange
    peers: PeerRegistry

    async def run_once(self) -> int:
        """Send each router the use at the others since the last turn; return how many rows."""
        routers = {
            router.name: router for router in self.peers.routers() if KEY_USE in router.capabilities
        }
        sent = 0
        for name, rows in self.exchange.take(list(routers)):
            routers[name].enqueue(FleetKeyUse(rows))
            sent += len(rows)
            # Keys times routers may be millions of rows; requests and reports have their turn.
            await asyncio.sleep(0)
        return sent

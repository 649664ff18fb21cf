"""Exchanges: two nodes trade all of their new replicas, or two replicas trade their sites.

None is a sequence of single moves that each lower the cost: a replica of four devices and the
ten small ones on another node of four are in each other's way, and each of two deployments may lack
the capacity that the other would leave. As after a forced move (`perturb.py`), the deployments that
were touched move and fill again, and the result is kept if the total cost is lower.

Two large replicas may have to trade nodes that small ones fill in between. So in the last kind of
exchange, all other new replicas leave both nodes as well, and what comes back is filled in the
order of size: what was left out because the small ones were in its way goes first.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from isochrone.wire.ids import NodeId
from scheduler.decide.cluster import FleetNode
from scheduler.decide.placement.search.deployment_state import DeploymentState, PlannedReplica
from scheduler.decide.placement.search.draft import PlacementDraft, Savepoint
from scheduler.decide.placement.search.effort import EffortBudget
from scheduler.decide.placement.search.greedy_fill import FillOrder, fill
from scheduler.decide.placement.search.swap import SlotSwap, in_order

REPAIRS_MAX: Final = 2
"""How many times the touched deployments move, fill and swap after an exchange."""

NODES_EFFORT: Final = 30
REPLICAS_EFFORT: Final = 10
CLEARING_EFFORT: Final = 30
"""The attempts that an exchange takes from the budget: of two nodes, of two replicas, and of two
replicas whose nodes are cleared."""


@dataclass(eq=False)
class Exchange:
    """Exchanges of replicas that this plan would start. Running replicas stay.

    `move` tries another place for one new replica and returns whether it moved.
    """

    draft: PlacementDraft
    swap: SlotSwap
    move: Callable[[PlannedReplica], bool]
    effort: EffortBudget

    def run(self) -> bool:
        """Exchange nodes, then replicas, then replicas whose nodes are cleared; stop at the first
        exchange that lowers the cost, and return whether there was one."""
        return (
            self._exchange_nodes()
            or self._exchange_replicas(self._trade_sites, REPLICAS_EFFORT)
            or self._exchange_replicas(self._trade_clearing, CLEARING_EFFORT)
        )

    def _exchange_nodes(self) -> bool:
        by_node = self._new_by_node()
        for first, second in self._alike_nodes(by_node):
            if not self.effort.spend(NODES_EFFORT):
                return False
            if self._trade(by_node.get(first, []), second, by_node.get(second, []), first):
                return True
        return False

    def _new_by_node(self) -> dict[NodeId, list[PlannedReplica]]:
        """Return the new replicas of each node that has any, without those over several nodes."""
        by_node: dict[NodeId, list[PlannedReplica]] = defaultdict(list)
        for state in self.draft.largest_first():
            for replica in state.new_replicas():
                if replica.slot and len(replica.slot.parts) == 1:
                    by_node[replica.slot.leader.node_id].append(replica)
        return by_node

    def _alike_nodes(
        self, by_node: dict[NodeId, list[PlannedReplica]]
    ) -> Iterator[tuple[NodeId, NodeId]]:
        """Return pairs of nodes in different PoPs with equal devices, of which one at least has
        new replicas; those with the largest replicas first."""
        fleet = self.draft.fleet
        alike: dict[tuple[tuple[str, int], ...], list[FleetNode]] = defaultdict(list)
        for node in fleet.nodes.values():
            alike[_devices_of(node)].append(node)
        seen: set[NodeId] = set()
        for node_id in by_node:
            node = fleet.nodes[node_id]
            seen.add(node_id)
            for other in alike[_devices_of(node)]:
                if other.node_id not in seen and other.pop != node.pop:
                    yield node_id, other.node_id

    def _trade(
        self,
        leaving: Sequence[PlannedReplica],
        to_node: NodeId,
        arriving: Sequence[PlannedReplica],
        from_node: NodeId,
    ) -> bool:
        """Let two nodes trade replicas. Return whether that lowers the cost; roll back if not."""
        draft = self.draft
        savepoint = draft.savepoint(draft.states)
        targets = dict.fromkeys(leaving, to_node)
        targets |= dict.fromkeys(arriving, from_node)
        for replica in targets:
            draft.remove(replica)
        sites = draft.fleet.table.sites_of_node
        for replica in sorted(targets, key=lambda r: -r.state.needs.memory_bytes):
            for site in sites.get(targets[replica], ()):
                if self._place_at(replica.state, site):
                    break
        return self._improves(savepoint, in_order(replica.state for replica in targets))

    def _exchange_replicas(
        self, trade: Callable[[PlannedReplica, PlannedReplica], bool], effort: int
    ) -> bool:
        """Try a trade of each two replicas that could be at each other's site."""
        # Of a thousand deployments, few have a replica that this plan would start.
        one_per_site = [
            (state, new) for state in self.draft.states if (new := state.new_per_site())
        ]
        for (first, of_first), (second, of_second) in combinations(one_per_site, 2):
            for replica in of_first:
                for counterpart in of_second:
                    if replica.site == counterpart.site:
                        continue
                    if not (
                        first.needs.site_capacity[counterpart.site] > 0
                        and second.needs.site_capacity[replica.site] > 0
                    ):
                        continue
                    if not self.effort.spend(effort):
                        return False
                    if trade(replica, counterpart):
                        return True
        return False

    def _trade_sites(self, first: PlannedReplica, second: PlannedReplica) -> bool:
        """Let two replicas trade sites. Return whether that lowers the cost; roll back if not."""
        draft = self.draft
        savepoint = draft.savepoint(draft.states)
        draft.remove(first)
        draft.remove(second)
        if self._place_at(first.state, second.site) and self._place_at(second.state, first.site):
            return self._improves(savepoint, in_order([first.state, second.state]))
        savepoint.roll_back()
        return False

    def _trade_clearing(self, first: PlannedReplica, second: PlannedReplica) -> bool:
        """Let two replicas trade sites; all other new replicas leave their nodes, and the draft is
        filled again, the largest first.

        Return whether that lowers the cost; roll back if not.
        """
        draft = self.draft
        by_node = self._new_by_node()
        leaving = list(
            dict.fromkeys(
                replica
                for node_id in (*first.node_ids, *second.node_ids)
                for replica in by_node.get(node_id, ())
            )
        )
        # Without others in between, the trade was tried before.
        if {first, second}.issuperset(leaving) or not {first, second}.issubset(leaving):
            return False
        savepoint = draft.savepoint(draft.states)
        for replica in leaving:
            draft.remove(replica)
        if self._place_at(first.state, second.site) and self._place_at(second.state, first.site):
            draft.blocked.clear()
            fill(draft, FillOrder.SIZE)
            return self._improves(savepoint, in_order(replica.state for replica in leaving))
        savepoint.roll_back()
        return False

    def _place_at(self, state: DeploymentState, site: int) -> bool:
        """Place a replica in a free slot of a site; return whether there was one."""
        if state.needs.site_capacity[site] <= 0:
            return False
        gain = self.draft.gain_at(state, site)
        if gain.candidate is None:
            return False
        self.draft.take(state, gain)
        return True

    def _improves(self, savepoint: Savepoint, touched: Sequence[DeploymentState]) -> bool:
        """Move, fill and swap until the cost is lower than at the savepoint; roll back if it does
        not become so."""
        for _ in range(REPAIRS_MAX):
            if savepoint.has_improved() or not self._repair(touched):
                break
        return savepoint.keep_if_improved()

    def _repair(self, touched: Sequence[DeploymentState]) -> bool:
        """Improve some deployments by moves and swaps; return whether any of them changed."""
        versions = [state.version for state in touched]
        for state in touched:
            for replica in state.new_replicas():
                self.move(replica)
        self.draft.blocked.clear()
        fill(self.draft)
        if self.swap.run_among_new():
            fill(self.draft)
        return versions != [state.version for state in touched]


def _devices_of(node: FleetNode) -> tuple[tuple[str, int], ...]:
    """Return the class and memory of each device of a node: equal nodes can trade replicas."""
    return tuple(sorted((device.device_class, device.memory_bytes) for device in node.devices))

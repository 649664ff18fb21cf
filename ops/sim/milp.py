"""The planner's cost as a mixed integer program, solved by HiGHS: the optimum of a small world.

Needs scipy (the extra `bench`). Each set of devices that a replica could take is a column, so
memory is exact; the assignment of load is fractional, as in the planner. Start times are those of
an idle node, so the optimum here is never above the true one.
"""

from collections import defaultdict
from itertools import combinations
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from isochrone.wire.ids import DeviceId, NodeId
from ops.sim.recost import SlotColumn, empty_draft
from scheduler.decide.capacity.device_classes import GIB
from scheduler.decide.cluster import ClusterState
from scheduler.decide.placement import PlanLimits
from scheduler.decide.placement.score import (
    ABSENT,
    MISSING,
    MISSING_SPREAD,
    ONE_POP_MS,
    UNSERVED_MS,
)
from scheduler.decide.placement.search.deployment_state import DeploymentState
from scheduler.decide.placement.search.draft import PlacementDraft

Terms = dict[int, float]
"""The coefficient of each column in one constraint."""

ColumnsBySite = dict[int, list[int]]
"""The columns of one deployment's slots at each site."""


class MilpSolution(NamedTuple):
    """The lowest cost found, the bound that no plan can be below, and the slots of that plan."""

    cost: float
    bound: float
    slots: list[SlotColumn]


class MilpProgram:
    """Collects the columns and rows of a program."""

    def __init__(self) -> None:
        self.slots: dict[int, SlotColumn] = {}
        self._cost: list[float] = []
        self._integer: list[int] = []
        self._upper: list[float] = []
        self._rows: list[tuple[Terms, float, float]] = []

    def column(self, cost: float, upper: float = np.inf, integer: bool = False) -> int:
        """Add a variable from 0 to `upper` and return its number."""
        self._cost.append(cost)
        self._upper.append(upper)
        self._integer.append(int(integer))
        return len(self._cost) - 1

    def row(self, terms: Terms, low: float, high: float) -> None:
        """Add the constraint low <= sum of terms <= high."""
        self._rows.append((terms, low, high))

    def solve(self, limit_s: float) -> MilpSolution:
        """Return the optimum by HiGHS, or the best plan found in `limit_s`."""
        data, rows, columns = [], [], []
        for number, (terms, _, _) in enumerate(self._rows):
            for column, value in terms.items():
                data.append(value)
                rows.append(number)
                columns.append(column)
        shape = (len(self._rows), len(self._cost))
        answer = milp(
            c=np.array(self._cost),
            integrality=np.array(self._integer),
            bounds=Bounds(0, np.array(self._upper)),
            constraints=LinearConstraint(
                csr_matrix((data, (rows, columns)), shape=shape),
                np.array([low for _, low, _ in self._rows]),
                np.array([high for _, _, high in self._rows]),
            ),
            options={"time_limit": limit_s, "mip_rel_gap": 1e-4},
        )
        if answer.fun is None:
            raise RuntimeError(f"cannot solve the program: {answer.message}")
        bound = answer.mip_dual_bound if answer.mip_dual_bound is not None else answer.fun
        slots = [
            slot for column, slot in self.slots.items() for _ in range(round(answer.x[column]))
        ]
        return MilpSolution(cost=float(answer.fun), bound=float(bound), slots=slots)


def solve(cluster: ClusterState, limit_s: float = 60.0) -> MilpSolution:
    """Return the lowest cost that any placement on an empty fleet can have."""
    program = MilpProgram()
    draft = empty_draft(cluster, PlanLimits())
    memory: dict[tuple[NodeId, DeviceId], Terms] = defaultdict(dict)
    for state in draft.states:
        _add_deployment(program, draft, state, memory)
    for key, terms in memory.items():
        program.row(terms, 0, draft.ledger.free[key] / GIB)
    return program.solve(limit_s)


def _add_deployment(
    program: MilpProgram,
    draft: PlacementDraft,
    state: DeploymentState,
    memory: dict[tuple[NodeId, DeviceId], Terms],
) -> None:
    """Add one deployment: its slots by device set, its load, and its requirements."""
    columns: ColumnsBySite = defaultdict(list)
    needs = state.needs
    count = needs.deployment.engine.devices
    device_gib = needs.memory_bytes / count / GIB
    for site, nodes in needs.eligible_nodes.items():
        device_class = draft.fleet.sites[site].device_class
        for node in nodes:
            candidate = draft.ledger.best_candidate(site, [node], needs)
            if candidate is None:
                continue
            fitting = [
                device.device_id
                for device in node.devices
                if device.healthy and device.device_class == device_class
            ]
            for chosen in combinations(fitting, count):
                cost = needs.hold_cost + candidate.start_cost
                column = program.column(cost, needs.replicas_max, integer=True)
                columns[site].append(column)
                program.slots[column] = SlotColumn(needs.deployment_id, site, node.node_id, chosen)
                for device_id in chosen:
                    memory[node.node_id, device_id][column] = device_gib
    _add_load(program, state, columns)
    _add_requirements(program, draft, state, columns)


def _add_load(program: MilpProgram, state: DeploymentState, columns: ColumnsBySite) -> None:
    load, unit = state.assignment.load, state.assignment.unit
    latency_ms = state.needs.latency_ms
    carried: dict[int, Terms] = defaultdict(dict)
    for city in range(len(load)):
        cost_per_ms = load[city] * unit[city]
        served = {program.column(cost_per_ms * UNSERVED_MS, 1.0): 1.0}
        for site, slot_columns in columns.items():
            ms = float(latency_ms[city, site])
            column = program.column(cost_per_ms * ms, 1.0)
            served[column] = 1.0
            carried[site][column] = load[city]
            program.row({column: 1.0, **dict.fromkeys(slot_columns, -1.0)}, -np.inf, 0)
        program.row(served, 1, 1)
    for site, terms in carried.items():
        capacity = float(state.needs.site_capacity[site])
        program.row({**terms, **dict.fromkeys(columns[site], -capacity)}, -np.inf, 0)


def _add_requirements(
    program: MilpProgram, draft: PlacementDraft, state: DeploymentState, columns: ColumnsBySite
) -> None:
    needs = state.needs
    everywhere = dict.fromkeys((c for at_site in columns.values() for c in at_site), 1.0)
    program.row(everywhere, 0, needs.replicas_max)
    missing = program.column(MISSING * needs.weight)
    program.row({**everywhere, missing: 1.0}, needs.replicas_min, np.inf)
    absent = program.column(ABSENT * needs.weight * needs.has_demand, 1.0, integer=True)
    program.row({**everywhere, absent: 1.0}, 1, np.inf)
    program.row({**everywhere, absent: float(needs.replicas_max)}, 0, needs.replicas_max)
    by_pop: dict[str, list[int]] = defaultdict(list)
    for site, at_site in columns.items():
        by_pop[draft.fleet.sites[site].pop] += at_site
    for pop in set(needs.deployment.policy.keep_warm):
        cold = program.column(MISSING * needs.weight, 1.0)
        program.row({**dict.fromkeys(by_pop.get(pop, []), 1.0), cold: 1.0}, 1, np.inf)
    if needs.replicas_max < 2:
        return
    spread = ONE_POP_MS * needs.total_requests_per_s + MISSING_SPREAD * (needs.replicas_min >= 2)
    in_one_pop = program.column(needs.weight * spread, 1.0)
    terms = {in_one_pop: 1.0, absent: 1.0}
    for in_pop in by_pop.values():
        has_pop = program.column(0.0, 1.0)
        program.row({has_pop: 1.0, **dict.fromkeys(in_pop, -1.0)}, -np.inf, 0)
        terms[has_pop] = 1.0
    program.row(terms, 2, np.inf)

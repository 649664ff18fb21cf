"""The planner's sum as a mixed integer program, for HiGHS: the optimum the planner is held to.

Needs scipy (the extra `bench`). Seats are counted by the very set of devices they take, so memory
is exact; who serves whom is fractional, as in the planner. Start times count as on an idle node, so
the optimum here is never above the true one.
"""

from collections import defaultdict
from itertools import combinations
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from ops.sim.recost import SlotColumn
from scheduler.decide.cluster import ClusterState
from scheduler.decide.membership.liveness import judge_liveness
from scheduler.decide.placement.fleet.fleet_capacity import FleetCapacity
from scheduler.decide.placement.planner import DraftPlan, PlanLimits
from scheduler.decide.placement.score import (
    ABSENT,
    MISSING,
    MISSING_SPREAD,
    ONE_POP_MS,
    UNSERVED_MS,
)
from scheduler.decide.placement.search.deployment_state import DeploymentState


class MilpSolution(NamedTuple):
    """The best sum found, the bound that no plan can be below, and the seats of the best."""

    cost: float
    bound: float
    seats: list[SlotColumn]


class MilpProgram:
    """Rows and columns of a program, gathered one at a time."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.integer: list[int] = []
        self.upper: list[float] = []
        self.seats: dict[int, SlotColumn] = {}
        self._rows: list[tuple[dict[int, float], float, float]] = []

    def column(self, cost: float, upper: float = np.inf, integer: bool = False) -> int:
        """Add a variable from 0 to `upper`."""
        self.cost.append(cost)
        self.upper.append(upper)
        self.integer.append(int(integer))
        return len(self.cost) - 1

    def row(self, terms: dict[int, float], low: float, high: float) -> None:
        """Add low <= sum of terms <= high."""
        self._rows.append((terms, low, high))

    def solve(self, limit_s: float) -> MilpSolution:
        """Return the optimum by HiGHS."""
        data, rows, columns = [], [], []
        for number, (terms, _, _) in enumerate(self._rows):
            for column, value in terms.items():
                data.append(value)
                rows.append(number)
                columns.append(column)
        shape = (len(self._rows), len(self.cost))
        answer = milp(
            c=np.array(self.cost),
            integrality=np.array(self.integer),
            bounds=Bounds(0, np.array(self.upper)),
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
        seats = [
            seat for column, seat in self.seats.items() for _ in range(round(answer.x[column]))
        ]
        return MilpSolution(cost=float(answer.fun), bound=float(bound), seats=seats)


def solve(cluster: ClusterState, limit_s: float = 60.0) -> MilpSolution:
    """Return the least sum that any placement of an empty fleet can have."""
    program = MilpProgram()
    draft = DraftPlan(cluster, judge_liveness(cluster.nodes, cluster.acting_for_s), PlanLimits())
    models = {model.model_id: model for model in cluster.models}
    memory: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for deployment in cluster.deployments:
        wish = draft.wish_of(deployment, models[deployment.model_id])
        _add(program, draft.ground, wish, memory)
    for key, terms in memory.items():
        program.row(terms, 0, draft.ground.free[key] / 2**30)  # type: ignore[index]
    return program.solve(limit_s)


def _add(
    program: MilpProgram,
    ground: FleetCapacity,
    wish: DeploymentState,
    memory: dict[tuple[str, str], dict[int, float]],
) -> None:
    """Add one deployment: its seats by device set, what serves its cities, what it lacks."""
    seats: dict[int, list[int]] = defaultdict(list)
    count = wish.deployment.engine.devices
    each_gib = wish.memory_bytes / count / 2**30
    for site, nodes in wish.nodes_of.items():
        for node in nodes:
            offered = ground.offer(site, [node], wish.deployment, wish.model)
            if offered is None:
                continue
            fitting = [
                device.device_id
                for device in node.devices
                if device.healthy and device.device_class == ground.sites[site].device_class
            ]
            for chosen in combinations(fitting, count):
                column = program.column(wish.hold + offered.cost, wish.most, integer=True)
                seats[site].append(column)
                program.seats[column] = SlotColumn(wish.name, site, node.node_id, chosen)
                for device_id in chosen:
                    memory[node.node_id, device_id][column] = each_gib
    _add_flow(program, wish, seats)
    _add_shortfall(program, ground, wish, seats)


def _add_flow(program: MilpProgram, wish: DeploymentState, seats: dict[int, list[int]]) -> None:
    load, unit = wish.flow.load, wish.flow.unit
    carried: dict[int, dict[int, float]] = defaultdict(dict)
    for city in range(len(load)):
        whole = load[city] * unit[city]
        served = {program.column(whole * UNSERVED_MS, 1.0): 1.0}
        for site, columns in seats.items():
            ms = float(wish.flow.far[city, site])
            column = program.column(whole * ms, 1.0)
            served[column] = 1.0
            carried[site][column] = load[city]
            program.row({column: 1.0, **dict.fromkeys(columns, -1.0)}, -np.inf, 0)
        program.row(served, 1, 1)
    for site, terms in carried.items():
        room = float(wish.rooms[site])
        program.row({**terms, **dict.fromkeys(seats[site], -room)}, -np.inf, 0)


def _add_shortfall(
    program: MilpProgram, ground: FleetCapacity, wish: DeploymentState, seats: dict[int, list[int]]
) -> None:
    everywhere = dict.fromkeys((c for columns in seats.values() for c in columns), 1.0)
    program.row(everywhere, 0, wish.most)
    missing = program.column(MISSING * wish.weight)
    program.row({**everywhere, missing: 1.0}, wish.least, np.inf)
    absent = program.column(ABSENT * wish.weight * wish.is_asked_for, 1.0, integer=True)
    program.row({**everywhere, absent: 1.0}, 1, np.inf)
    program.row({**everywhere, absent: float(wish.most)}, 0, wish.most)
    by_pop: dict[str, list[int]] = defaultdict(list)
    for site, columns in seats.items():
        by_pop[ground.sites[site].pop] += columns
    for pop in set(wish.deployment.policy.keep_warm):
        cold = program.column(MISSING * wish.weight, 1.0)
        program.row({**dict.fromkeys(by_pop.get(pop, []), 1.0), cold: 1.0}, 1, np.inf)
    if wish.most < 2:
        return
    spread = ONE_POP_MS * wish.requests_per_s + MISSING_SPREAD * (wish.least >= 2)
    alone = program.column(wish.weight * spread, 1.0)
    terms = {alone: 1.0, absent: 1.0}
    for columns in by_pop.values():
        there = program.column(0.0, 1.0)
        program.row({there: 1.0, **dict.fromkeys(columns, -1.0)}, -np.inf, 0)
        terms[there] = 1.0
    program.row(terms, 2, np.inf)

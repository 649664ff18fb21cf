"""Simulators: the production decision code, unchanged, in worlds drawn by stated rules.

Routing (`python -m ops.sim`): `world` has the cities and replicas, `traces` the requests, `replica`
the model of an engine, `router` what a PoP knows; `isochrone_policy` is the router's own ranking,
`policies` are others of the field, `oracle` knows everything; `run` simulates one run, `cases`
and `measure` define and sum up many, `report` tables and plots them. `processes` splits routers
into processes, `blocks` checks prefix keys, `calibrate` and `calibration` compare with a live
fleet.

Placement (`python -m ops.sim.planet`): `planet_world` draws the planet, `planet` simulates its week
(with `planet_rollout` and `planet_forecast`) and `planet_week` tabulates it. `served` assigns
requests, `compare` compares placement policies, `price_sweep` varies the planner's prices, and
`planet_map` draws a plan. The distance from the optimum: `optimality_gap` and `milp` on
`small_worlds`; `planet_bound` (by `lagrangian_bound`) on the planet; `latency_bound` for how close
to its users any placement can be.
"""

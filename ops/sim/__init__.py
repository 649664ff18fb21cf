"""Simulators: the production decision code, unchanged, in worlds drawn by stated rules.

Routing (`python -m ops.sim`): `world` has the cities and replicas, `traces` the requests, `replica`
the model of an engine, `router` what a PoP knows; `isochrone_policy` is the router's own ranking,
`policies` are others of the field, `oracle` knows everything; `run` simulates one run, `cases`
and `measure` define and sum up many, `report` tables and plots them. `processes` splits routers
into processes, `blocks` checks prefix keys, `calibrate` and `calibration` compare with a live
fleet.

Placement (`python -m ops.sim.planet`): `planet_world` draws the planet, `planet` runs its week
(`rolling` its rollout, `foretold` what is forecast) and `week` tables it, `served` says how
requests fare, `compare` sets policies side by side, `prices` the planner's own with other prices.
How far from the best it is: `judge` and `milp` on `small` worlds; `bound` (by `dual`) on the
planet, `reach` for how near its users can be at all.
"""

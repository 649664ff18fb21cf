"""Simulators: the production decision code, unchanged, over worlds drawn by stated rules.

The choice (`python -m ops.sim`): `world` says where and how fast, `traces` who asks for what,
`replica` how one engine behaves, `router` what a PoP knows, `policies` how others choose, `ours`
and `oracle` how we and the all-knowing do, `run` lets it happen.

Placement (`python -m ops.sim.planet`): `planet_world` draws the planet, `planet` simulates its week
(with `planet_rollout` and `planet_forecast`) and `planet_week` tabulates it. `served` assigns
requests, `compare` compares placement policies, `price_sweep` varies the planner's prices, and
`planet_map` draws a plan. The distance from the optimum: `optimality_gap` and `milp` on
`small_worlds`; `planet_bound` (by `lagrangian_bound`) on the planet; `latency_bound` for how close
to its users any placement can be.
"""

"""Simulators: the production decision code, unchanged, over worlds drawn by stated rules.

The choice (`python -m ops.sim`): `world` says where and how fast, `traces` who asks for what,
`replica` how one engine behaves, `router` what a PoP knows, `policies` how others choose, `ours`
and `oracle` how we and the all-knowing do, `run` lets it happen.

Placement (`python -m ops.sim.planet`): `planet_world` draws the planet, `planet` runs its week
(`rolling` its rollout, `foretold` what is forecast) and `week` tables it, `served` says how
requests fare, `compare` sets policies side by side, `prices` the planner's own with other prices.
How far from the best it is: `judge` and `milp` on `small` worlds; `bound` (by `dual`) on the
planet, `reach` for how near its users can be at all.
"""

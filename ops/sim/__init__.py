"""The proof of the choice: a deterministic simulator of many cities that runs the router's code.

`world` says where and how fast, `traces` who asks for what, `replica` how one engine behaves,
`router` what a PoP knows, `policies` how others choose, `ours` and `oracle` how we and the
all-knowing do, `run` lets it happen. `python -m ops.sim` prints the tables.
"""

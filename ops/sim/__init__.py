"""The proof of the choice: a deterministic simulator of many cities that runs the router's own code.

`world` says where and how fast, `traces` who asks for what, `replica` how one engine behaves, `router`
what a PoP knows, `policies` how others choose, `run` lets it happen. `python -m ops.sim` prints tables.
"""

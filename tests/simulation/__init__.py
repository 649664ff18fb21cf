"""Deterministic simulation of the control plane: schedulers, agents and routers in one process.

The code of the services runs unchanged on a simulated clock (`event_loop`), network (`network`) and
store (`store` and `store_functions`, which `test_store_conformance` holds to the real SQL). `world`
composes a fleet, `faults` draws what happens to it from a seed, `invariants` says what must hold,
and `history` runs one seed. `python -m tests.simulation --help` runs many.
"""

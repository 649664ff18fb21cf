"""The demo states its model as `isochrone models add` would."""

from ops.fleet import model


def test_the_demos_model_has_its_dimensions() -> None:
    """Without them adapters are not checked, and the planner overestimates the rates."""
    entry = model.catalogue_entry()
    shape = entry["shape"]
    assert shape["layers"] * shape["hidden_size"] == 30 * 576
    # Of a number in 16 bits; the planner doubles it on a CPU.
    assert entry["kv_bytes_per_token"] == 2 * 2 * 30 * 192
    assert entry["context_tokens"] == 8192

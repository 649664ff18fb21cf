"""Checks whether an adapter's tensors fit its base model, by their names and shapes alone.

Every engine would refuse an adapter of another base model, or worse, apply it to the wrong weights.
Names are those of PEFT for Hugging Face models: `...layers.3.self_attn.q_proj.lora_A`.
"""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from isochrone.wire.models.adapter_files import AdapterConfig, BadAdapter, TensorShapes
from isochrone.wire.models.model import ModelDimensions

_WEIGHT: Final = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)\.weight")
_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d{1,5})\.(?:.+\.)?([a-z_]+)$")


class _ModuleSize(NamedTuple):
    """The values that a module takes and returns for each token; 0 if they are not known."""

    columns: int
    rows: int


def check_adapter(
    config: AdapterConfig, shapes: TensorShapes, dimensions: ModelDimensions | None
) -> None:
    """Raise BadAdapter if the tensors are not the low-rank updates of modules of the model.

    Without `dimensions` (a model without config.json) only their shapes among each other count.
    """
    halves: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        matched = _WEIGHT.fullmatch(name)
        if matched is None:
            raise BadAdapter(
                f"cannot use tensor {name[:200]!r}: expected names like"
                " 'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'"
            )
        halves.setdefault(matched[1], {})[matched[2]] = shape
    if not halves:
        raise BadAdapter("cannot use the weights: the file has no tensors")
    for module, shapes_of in halves.items():
        _check_module(module, shapes_of, config.r, dimensions)


def _check_module(
    module: str,
    halves: Mapping[str, tuple[int, ...]],
    rank: int,
    dimensions: ModelDimensions | None,
) -> None:
    """Raise BadAdapter if one module's two tensors do not fit each other and the model."""
    name = module[:200]
    down, up = halves.get("A"), halves.get("B")
    if down is None or up is None:
        missing = "lora_A" if down is None else "lora_B"
        raise BadAdapter(f"cannot use module {name!r}: its {missing} is missing")
    if len(down) != 2 or len(up) != 2 or down[0] != rank or up[1] != rank:
        raise BadAdapter(
            f"cannot use module {name!r}: lora_A is {list(down)} and lora_B {list(up)}, expected"
            f" [{rank}, columns] and [rows, {rank}], as `r` is {rank} in the config"
        )
    layer = _LAYER.search(module)
    if dimensions is None or layer is None:
        return
    if int(layer[1]) >= dimensions.layers:
        raise BadAdapter(
            f"cannot use module {name!r}: the base model has {dimensions.layers} layers;"
            " the adapter is for another model"
        )
    expected = _module_size(layer[2], dimensions)
    if (expected.columns or down[1], expected.rows or up[0]) != (down[1], up[0]):
        raise BadAdapter(
            f"cannot use module {name!r}: it takes {down[1]} values and returns {up[0]}, that of"
            f" the base model takes {expected.columns or 'any'} and returns"
            f" {expected.rows or 'any'}; the adapter is for another model"
        )


def _module_size(part: str, dimensions: ModelDimensions) -> _ModuleSize:
    """Return the size of a module of a transformer layer, as far as it follows from the model."""
    hidden = dimensions.hidden_size
    if dimensions.latent_size:
        # Multi-head latent attention has other projections, of sizes that are not known here.
        return _ModuleSize(0, 0)
    queries = dimensions.heads * dimensions.head_size
    keys = dimensions.kv_heads * dimensions.head_size
    sizes = {
        "q_proj": _ModuleSize(hidden, queries),
        "k_proj": _ModuleSize(hidden, keys),
        "v_proj": _ModuleSize(hidden, keys),
        "o_proj": _ModuleSize(queries, hidden),
        "gate_proj": _ModuleSize(hidden, 0),
        "up_proj": _ModuleSize(hidden, 0),
        "down_proj": _ModuleSize(0, hidden),
    }
    return sizes.get(part, _ModuleSize(0, 0))

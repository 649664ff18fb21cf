"""The demo states its model as `isochrone models add` would."""

from importlib import metadata
from pathlib import Path

from isochrone.cli.manifest import config_values
from ops.fleet import model


def test_the_demos_kv_of_a_token_is_what_the_file_says() -> None:
    """The planner doubles it on a CPU: twice as much would halve the tokens in flight."""
    folder = Path(str(metadata.distribution(model.PACKAGE).locate_file(model.FOLDER)))
    files = [path.name for path in folder.glob("*.gguf")]
    values, entry = config_values(folder, files), model.catalogue_entry()
    assert values["kv_bytes_per_token"] == entry["kv_bytes_per_token"]
    assert values["context_tokens"] == entry["context_tokens"]

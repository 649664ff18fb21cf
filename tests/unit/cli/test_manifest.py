"""A model's entry is made of the model's files alone."""

from pathlib import Path

import pytest

from isochrone.cli.manifest import ManifestError, artifact_of, facts_of


def test_what_a_download_keeps_for_itself_is_no_part_of_the_model(tmp_path: Path) -> None:
    for name in (
        "model.safetensors",
        "1_Pooling/config.json",
        ".gitattributes",
        ".cache/huggingface/download/model.safetensors.metadata",
        ".git/HEAD",
        "__pycache__/modeling.cpython-311.pyc",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    artifact = artifact_of(tmp_path, "hf:a/b@main")
    assert [file.path for file in artifact.files] == ["1_Pooling/config.json", "model.safetensors"]


@pytest.mark.parametrize("text", ["[]", "7", "{", '{"architectures": 3}'])
def test_a_config_that_is_none_is_refused_in_words(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ManifestError, match=r"config\.json"):
        facts_of(tmp_path)


def test_a_folder_without_a_config_says_nothing(tmp_path: Path) -> None:
    assert facts_of(tmp_path) == {}
    with pytest.raises(ManifestError, match="there is no file in it"):
        artifact_of(tmp_path, "file:x")

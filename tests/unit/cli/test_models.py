"""`models add` reads the files again, and keeps what no file says."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from isochrone.cli import models
from isochrone.cli.context import CliContext

PRICE = {"prompt_per_million": 0.5, "output_per_million": 2.0, "cached_per_million": None}


class Catalogue:
    """An admin API whose catalogue has a model `m`."""

    def __init__(self) -> None:
        self.row: dict[str, Any] = {
            "model": {"model_id": "m", "licence": "MIT", "price": PRICE, "extra_bytes": 7},
            "etag": 3,
            "signed_by": "",
        }
        self.sent: list[tuple[Any, int | None]] = []

    def list(self, _: str) -> list[dict[str, Any]]:
        return [self.row]

    def ask(self, _: str, __: str, body: Any, *, etag: int | None) -> dict[str, Any]:
        self.sent.append((body, etag))
        return self.row


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    return tmp_path


def add(api: Any, folder: Path, name: str, *options: str) -> Any:
    arguments = [name, "--source", f"file:{folder}", *options]
    return CliRunner().invoke(models.models_add, arguments, obj=CliContext(api, "table"))


@pytest.mark.parametrize(
    ("options", "licence", "price"),
    [
        ((), "MIT", PRICE),
        (("--licence", "", "--price", ""), "", None),
        (("--price", "1:3:0.1"), "MIT", {**PRICE, "prompt_per_million": 1.0}),
    ],
)
def test_a_model_that_is_added_again_keeps_its_price(
    options: tuple[str, ...], licence: str, price: dict[str, float] | None, folder: Path
) -> None:
    api = Catalogue()
    result = add(api, folder, "m", *options)
    assert result.exit_code == 0, result.output
    ((body, etag),) = api.sent
    assert (body["licence"], body["extra_bytes"], etag) == (licence, 7, 3)
    if price is None:
        assert body["price"] is None
    else:
        assert body["price"]["prompt_per_million"] == price["prompt_per_million"]


def test_a_new_model_has_no_price_and_replaces_none(folder: Path) -> None:
    api = Catalogue()
    assert add(api, folder, "new").exit_code == 0
    ((body, etag),) = api.sent
    assert ("price" in body, etag) == (False, None)


def test_a_wrong_price_is_refused_before_the_files_are_read(tmp_path: Path) -> None:
    result = add(Catalogue(), tmp_path / "nowhere", "m", "--price", "1")
    assert (result.exit_code, "cannot read price '1'" in result.output) == (2, True)

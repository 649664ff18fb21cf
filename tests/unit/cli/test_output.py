"""The output is readable on a terminal and in a pipe."""

import errno
import os
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from isochrone.cli import main as cli
from isochrone.cli.output import cell, heading, show_one, show_rows


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("frozen", "", "-"),
        ("unmet", [], "-"),
        ("restarts", 0, "0"),
        ("draining", False, "no"),
        ("silent_s", 0.265124, "0.2651"),
        ("ttft_p90_ms", 8166.92, "8167"),
        ("created_at", 1_795_280_754.5, "2026-11-21 17:05:54Z"),
        ("key", {"expires_at": 0.0, "n": 2}, "expires_at=-, n=2"),
        ("deprecation", {"sunset_at": 1_806_451_200}, "sunset_at=2027-03-31 00:00:00Z"),
        ("pops", ["ams", "fra"], "ams; fra"),
        ("spec", {"engine": {"devices": 1}, "pops": ["ams"]}, "engine=(devices=1), pops=(ams)"),
    ],
)
def test_a_value_is_formatted_for_a_table(name: str, value: object, shown: str) -> None:
    assert cell(value, name) == shown


def test_output_to_a_pipe_is_not_folded(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"replica_id": "r" * 60, "reason": "why " * 40}
    show_rows([row], ["replica_id", "reason"], "table")
    lines = capsys.readouterr().out.splitlines()
    assert all(line == line.rstrip() for line in lines)
    assert [line.split() for line in lines] == [
        ["REPLICA", "ID", "REASON"],
        ["r" * 60] + 40 * ["why"],
    ]


def test_numbers_are_aligned_at_the_right_and_units_are_in_the_heading(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows: list[dict[str, object]] = [
        {"node_id": "a-1", "silent_s": 1.5, "replicas": 3, "at": 1, "note": None},
        {"node_id": "a-2", "silent_s": None, "replicas": 12, "at": 0, "note": None},
    ]
    show_rows(rows, ["node_id", "silent_s", "replicas", "at", "note"], "table")
    assert capsys.readouterr().out.splitlines() == [
        "NODE ID  SILENT (s)  REPLICAS  AT                    NOTE",
        "a-1             1.5         3  1970-01-01 00:00:01Z  -",
        "a-2               -        12  -                     -",
    ]


@pytest.mark.parametrize(
    ("column", "shown"),
    [("rtt_ms", "RTT (ms)"), ("requests_per_s", "REQUESTS/s"), ("size_mib", "SIZE (MiB)")],
)
def test_a_heading_has_the_unit(column: str, shown: str) -> None:
    assert heading(column) == shown


def test_a_long_object_has_a_line_for_each_field(capsys: pytest.CaptureFixture[str]) -> None:
    files = [{"path": "a.gguf", "size_bytes": 5}, {"path": "b.gguf", "size_bytes": 6}]
    row = {"model": {"name": "m" * 80, "files": files}, "replicas": {"warm": 1, "loading": 2}}
    show_one(row, "table")
    assert capsys.readouterr().out.splitlines() == [
        "model",
        f"  name    {'m' * 80}",
        "  files   path=a.gguf, size_bytes=5",
        "          path=b.gguf, size_bytes=6",
        "replicas  warm=1, loading=2",
    ]


def test_each_item_of_a_list_gets_its_own_line(capsys: pytest.CaptureFixture[str]) -> None:
    show_one({"frozen": "", "unmet": ["a: no memory; none", "b: no"], "pops": []}, "table")
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["frozen  -", "unmet   a: no memory; none", "        b: no", "pops    -"]


@pytest.mark.parametrize(
    "text", [b"\xff", b"url = ", None], ids=["not text", "not TOML", "a folder"]
)
def test_an_unreadable_config_file_gives_an_error_message(
    text: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "CONFIG_FILE", tmp_path / "config.toml")
    if text is None:
        (tmp_path / "config.toml").mkdir()
    else:
        (tmp_path / "config.toml").write_bytes(text)
    result = CliRunner().invoke(cli.main, ["status"])
    assert result.exit_code == 1
    assert f"cannot read {tmp_path}/config.toml" in result.output


def test_a_table_shows_markup_as_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    show_rows([{"reason": "[rank0]: error in [/x] :x:"}], ["reason"], "table")
    assert capsys.readouterr().out.splitlines()[1] == "[rank0]: error in [/x] :x:"


def test_a_disk_that_is_full_is_said_and_a_closed_pipe_is_left_to_click(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def write(_: str) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(click, "echo", write)
    number = errno.ENOSPC
    with pytest.raises(click.ClickException, match="cannot write the output: No space left"):
        show_rows([], ["at"], "json")
    number = errno.EPIPE
    with pytest.raises(BrokenPipeError):
        show_one({"at": 0}, "table")


def test_the_list_of_commands_has_whole_sentences() -> None:
    def check(group: click.Group) -> None:
        width = 80 - 2 - 6 - max(map(len, group.commands))  # as click writes it
        for name, command in group.commands.items():
            assert not command.get_short_help_str(width).endswith("..."), name
            if isinstance(command, click.Group):
                check(command)

    assert isinstance(cli.main, click.Group)
    check(cli.main)


def test_a_group_that_is_a_command_itself_takes_the_output_option() -> None:
    answered = CliRunner().invoke(cli.main, ["routers", "-o", "json", "list", "--help"])
    assert answered.exit_code == 0, answered.output

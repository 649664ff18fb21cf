"""Configuration, snapshots and identity."""

import base64
import errno
import fcntl
import json
import logging
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from isochrone.service import files
from isochrone.service.config import ConfigError, load_config
from isochrone.service.files import write_atomic
from isochrone.service.logs import setup_logs
from isochrone.service.trust import identity
from isochrone.service.trust.identity import BACKDATED_MAX, Authority, IdentityError
from isochrone.wire.ids import PopId
from isochrone.wire.peers.control import PeerRole
from nodeagent.__main__ import main as node_command
from nodeagent.config import OLD_NAMES, NodeConfig
from router.__main__ import main as router_command
from router.config import RouterConfig
from router.processes import WorkerIdentity, worker_config
from scheduler.config import SchedulerConfig

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    state: Path
    port: int = 1
    urls: tuple[str, ...] = ()


def test_the_environment_overrides_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('state = "/a"\nport = 2\n')
    env = {"X_PORT": "3", "X_URLS": '["http://a"]'}
    assert load_config(Config, path, env, "X_") == Config(
        state=Path("/a"), port=3, urls=("http://a",)
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port = 'x'\nstate='/a'", "port"),
        ("stat = '/a'", "stat"),
        ("port = ", "cannot read config"),
        ("state = '/\xe9'", "it is not UTF-8 text"),
        ("port = 3", "state"),
    ],
)
def test_a_wrong_config_is_refused_with_the_reason(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=words):
        load_config(Config, path, {}, "X_")


def test_an_unknown_environment_variable_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="cannot use the variable X_PROT"):
        load_config(Config, None, {"X_STATE": "/a", "X_PROT": "3", "Y_PORT": "3"}, "X_")


NODE = {"name": "n", "state": "/a", "schedulers": '["http://s:1"]', "address": "http://n:1"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"schedulers": '["10.0.0.5:7001"]'}, r"schedulers\[0\]"),
        ({"address": "10.0.0.7:9000"}, "address"),
        ({"address": "http://10.0.0.7:9000", "listen_tls": "true"}, "must begin with https"),
        ({"address": "https://10.0.0.7:9000"}, "must begin with https"),
        ({"private_port": "9101"}, "private_port 9101 without private_host"),
    ],
)
def test_an_address_at_which_nothing_would_answer_is_refused(
    settings: dict[str, str], words: str
) -> None:
    env = {f"X_{name.upper()}": text for name, text in (NODE | settings).items()}
    with pytest.raises(ConfigError, match=words):
        load_config(NodeConfig, None, env, "X_")


OLD_NAMED: dict[str, Any] = {"name": "n", "state": "/a", "schedulers": ["https://s:1"]} | {
    "address": "https://n:1", "door_host": "::1", "door_port": 9, "door_tls": True}  # fmt: skip


@pytest.mark.parametrize("in_variables", [False, True], ids=["file", "variables"])
def test_the_old_name_of_a_setting_is_read_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, in_variables: bool
) -> None:
    path, env = tmp_path / "node.toml", {}
    lines = [f"{name} = {json.dumps(value)}" for name, value in OLD_NAMED.items()]
    path.write_text("\n".join(lines[:4] if in_variables else lines))
    if in_variables:
        env = {"X_DOOR_HOST": "::1", "X_DOOR_PORT": "9", "X_DOOR_TLS": "true"}
    config = load_config(NodeConfig, path, env, "X_", OLD_NAMES)
    assert (config.listen_host, config.listen_port, config.listen_tls) == ("::1", 9, True)
    warned = [record.__dict__["fields"] for record in caplog.records]
    assert [(one["old_name"], one["name"]) for one in warned] == list(OLD_NAMES.items())


@pytest.mark.parametrize("variable", ["X_LISTEN_PORT", "X_DOOR_PORT"])
def test_a_setting_under_both_of_its_names_is_refused(tmp_path: Path, variable: str) -> None:
    path = tmp_path / "node.toml"
    in_file = "listen_port" if variable == "X_DOOR_PORT" else "door_port"
    path.write_text(f"{in_file} = 9")
    with pytest.raises(ConfigError, match="cannot use both door_port and listen_port"):
        load_config(NodeConfig, path, {variable: "9"}, "X_", OLD_NAMES)


def test_an_agent_warns_of_an_old_name_in_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()  # the agent sets both of these
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    path = tmp_path / "node.toml"
    path.write_text('log_level = "verbose"\ndoor_port = 9\n')
    env = {f"ISOCHRONE_NODE_{name.upper()}": text for name, text in NODE.items()}
    result = CliRunner().invoke(node_command, ["--config", str(path)], env=env)
    warning, error = result.stderr.splitlines()
    assert json.loads(warning)["old_name"] == "door_port"
    assert error.startswith("cannot use log_level"), "the agent does not start in this test"


def test_a_private_port_without_an_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="private_port 9100 without private_host"):
        load_config(RouterConfig, None, {"X_PRIVATE_PORT": "9100"}, "X_")
    config = RouterConfig(private_host="10.0.0.1", private_port=9100)
    listening: Any = None
    worker = worker_config(WorkerIdentity(1, listening, 443), config)
    assert (worker.private_host, worker.private_port) == ("", 0), "the main process has it"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[liveness]\nlost_after = 60", "unknown field `lost_after`"),
        ("state = '/var'", "unknown field `state`; .* are in scheduler/config.py"),
        ("[liveness]\nlost_after_s = -1", r"\$\.liveness\.lost_after_s"),
        ("[liveness]\nstorm_share = 20", r"liveness\.storm_share 20"),
        ("[batches]\nitems_max = 0", r"\$\.batches\.items_max"),
        ("[adapters]\nrank_max = -8", r"\$\.adapters\.rank_max"),
        ("[responses]\nkeep_days = 0", r"\$\.responses\.keep_days"),
        ("lease_ttl_s = 2.5", "the lease would expire before it is renewed"),
    ],
)
def test_limits_that_a_scheduler_cannot_keep_are_refused(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "scheduler.toml"
    needed = 'name = "s"\ndatabase_url = "x"\nauthority = "/a"\nadmin_token_file = "/t"\n'
    path.write_text(needed + text)
    with pytest.raises(ConfigError, match=words):
        load_config(SchedulerConfig, path, {}, "X_")
    path.write_text(f"{needed}[responses]\ntenant_bytes_max = 0")
    assert load_config(SchedulerConfig, path, {}, "X_").responses.tenant_bytes_max == 0


def test_an_unknown_log_level_is_refused_before_anything_is_logged(tmp_path: Path) -> None:
    words = "cannot use log_level 'verbose': use one of DEBUG, INFO"
    with pytest.raises(ConfigError, match=words):
        setup_logs("router", "verbose")
    path = tmp_path / "router.toml"
    path.write_text('log_level = "verbose"')
    result = CliRunner().invoke(router_command, ["--config", str(path)])
    assert (result.exit_code, words in result.stderr) == (2, True), result.stderr


def test_a_state_folder_is_locked_for_one_process(tmp_path: Path) -> None:
    with files.lock_state_folder(tmp_path / "state"):
        with (
            pytest.raises(ConfigError, match="another process uses it"),
            files.lock_state_folder(tmp_path / "state"),
        ):
            pass
        with files.lock_state_folder(tmp_path / "state" / "worker-1"):
            pass
    with files.lock_state_folder(tmp_path / "state"):
        pass
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match="cannot use the state folder"),
        files.lock_state_folder(tmp_path / "file"),
    ):
        pass


def test_a_file_system_without_locks_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    words = f"cannot lock the state folder {tmp_path}: No locks available"
    with pytest.raises(ConfigError, match=words), files.lock_state_folder(tmp_path):
        pass


def test_a_torn_snapshot_falls_back_to_the_previous_one(tmp_path: Path) -> None:
    path = tmp_path / "table"
    assert files.read_snapshot(path) is None
    files.write_snapshot(path, b"one")
    files.write_snapshot(path, b"two")
    assert files.read_snapshot(path) == b"two"
    path.write_bytes(path.read_bytes()[:-1] + b"X")
    assert files.read_snapshot(path) == b"one"
    path.unlink()
    assert files.read_snapshot(path) == b"one"
    assert (path.with_name("table.prev").stat().st_mode & 0o777) == 0o600


def test_a_snapshot_that_cannot_be_written_leaves_the_previous_one_as_it_is(
    tmp_path: Path,
) -> None:
    path = tmp_path / "table"
    files.write_snapshot(path, b"one")
    files.write_snapshot(path, b"two")
    path.write_bytes(path.read_bytes()[:-1])

    def pieces() -> Iterator[bytes]:
        yield b"three"
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        files.write_snapshot(path, pieces())
    assert files.read_snapshot(path) == b"one"


def issued(authority: Authority, role: PeerRole = PeerRole.AGENT) -> tuple[str, str]:
    key = identity.new_key_pem()
    csr = identity.make_csr(key, "whatever-it-asks-for")
    return key, authority.issue(csr, role=role, name="gpu-1", pop=PopId("ams"), now=NOW)


def test_a_snapshot_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "table"
    files.write_snapshot(path, b"one")
    files.write_snapshot(path, b"two")
    # Root may read every file, so a folder stands in for an unreadable one.
    path.unlink()
    path.mkdir()
    assert files.read_snapshot(path) == b"one"
    (tmp_path / "table.prev").unlink()
    with pytest.raises(ConfigError, match=f"cannot read {path}: Is a directory"):
        files.read_snapshot(path)


def test_a_certificate_names_its_peer_and_verifies_its_signatures(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "ca", "test", NOW)
    key, certificate = issued(Authority.load(tmp_path / "ca"))
    read = identity.verify_certificate(certificate, authority.ca_pem, NOW)
    assert read.subject == (PeerRole.AGENT, "gpu-1", "ams")
    assert (read.issued_at, read.expires_at) == (NOW - BACKDATED_MAX, NOW + timedelta(days=90))
    assert identity.is_for_key(certificate, key)
    assert not identity.is_for_key(certificate, identity.new_key_pem())
    assert identity.verify_signature(certificate, b"nonce", identity.sign(key, b"nonce"))
    assert not identity.verify_signature(certificate, b"other", identity.sign(key, b"nonce"))
    assert (tmp_path / "ca" / "ca.key").stat().st_mode & 0o777 == 0o600


def test_an_authority_is_created_completely_and_loaded_as_a_matching_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = write_atomic

    def interrupted(path: Path, data: bytes, mode: int = 0o600) -> None:
        if list(path.parent.iterdir()):
            raise KeyboardInterrupt
        real(path, data, mode)

    monkeypatch.setattr(identity, "write_atomic", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Authority.create(tmp_path / "a", "test", NOW)
    monkeypatch.undo()
    assert not (tmp_path / "a" / "ca.key").exists(), "the next start creates it again"
    made = Authority.create(tmp_path / "a", "test", NOW)
    assert Authority.load(tmp_path / "a").fingerprint == made.fingerprint
    assert made.cipher().decrypt(Authority.load(tmp_path / "a").cipher().encrypt(b"x")) == b"x"
    Authority.create(tmp_path / "b", "test", NOW)
    (tmp_path / "b" / "ca.crt").write_bytes((tmp_path / "a" / "ca.crt").read_bytes())
    with pytest.raises(IdentityError, match=r"ca\.crt does not match ca\.key"):
        Authority.load(tmp_path / "b")
    (tmp_path / "file").touch()
    with pytest.raises(IdentityError, match="cannot store an authority in"):
        Authority.create(tmp_path / "file", "test", NOW)


def test_a_foreign_or_expired_certificate_is_refused(tmp_path: Path) -> None:
    ours = Authority.create(tmp_path / "a", "ours", NOW)
    theirs = Authority.create(tmp_path / "b", "theirs", NOW)
    _, forged = issued(theirs)
    with pytest.raises(IdentityError, match="another authority"):
        identity.verify_certificate(forged, ours.ca_pem, NOW)
    _, certificate = issued(ours)
    with pytest.raises(IdentityError, match="join again"):
        identity.verify_certificate(certificate, ours.ca_pem, NOW + timedelta(days=100))
    with pytest.raises(IdentityError, match="check clocks"):
        identity.verify_certificate(certificate, ours.ca_pem, NOW - timedelta(days=2))


def test_a_certificate_that_the_library_cannot_use_is_refused_like_any_other(
    tmp_path: Path,
) -> None:
    """Anyone may send one: other errors would fill the log with their tracebacks."""
    authority = Authority.create(tmp_path, "ours", NOW)
    key, certificate = issued(authority)
    request = identity.make_csr(key, "n1")
    strange_version = _altered(certificate, b"\x02\x01\x02", b"\x02\x01\x6c")
    public_key = b"\x2a\x86\x48\xce\x3d\x02"
    strange_key = _altered(request, public_key + b"\x01", public_key + b"\x38")
    with pytest.raises(IdentityError, match="cannot read the certificate"):
        identity.verify_certificate(strange_version, authority.ca_pem, NOW)
    with pytest.raises(IdentityError, match="cannot read the certificate request"):
        authority.issue(strange_key, role=PeerRole.AGENT, name="n1", pop=PopId("ams"), now=NOW)


def _altered(pem: str, old: bytes, new: bytes) -> str:
    """Return the PEM of a certificate or request with its first `old` replaced."""
    first, *lines, last = pem.strip().splitlines()
    der = base64.b64decode("".join(lines))
    assert old in der
    return "\n".join((first, base64.b64encode(der.replace(old, new, 1)).decode(), last, ""))


def test_a_certificate_is_dated_back_but_not_before_a_revocation(tmp_path: Path) -> None:
    """Revocations of a name are compared with its date, by nodes of the release before, too."""
    authority = Authority.create(tmp_path / "a", "ours", NOW)

    def dated(lifetime_s: float, dated_after: datetime | None) -> timedelta:
        csr = identity.make_csr(identity.new_key_pem(), "n")
        certificate = authority.issue(
            csr,
            role=PeerRole.AGENT,
            name="n",
            pop=PopId("ams"),
            now=NOW,
            lifetime_s=lifetime_s,
            dated_after=dated_after,
        )
        return identity.read_certificate(certificate).issued_at - NOW

    day_s, hour = 86_400.0, timedelta(hours=1)
    assert dated(90 * day_s, None) == -timedelta(days=1)
    assert dated(90 * day_s, NOW - 30 * hour) == -timedelta(days=1)
    assert dated(90 * day_s, NOW - hour) == -hour
    assert dated(90 * day_s, NOW) == timedelta(0)
    # One of a short life is not renewed as soon as it is issued.
    assert dated(10 * 3600.0, None) == -hour


def test_a_join_token_is_parsed_only_in_its_exact_form() -> None:
    text = identity.format_join_token("ab" * 32, "abcdefghij01", "x" * 43)
    assert identity.parse_join_token(text) == ("ab" * 16, "abcdefghij01", "x" * 43)
    assert identity.parse_join_token(text[:-1]) is None
    assert identity.parse_join_token("") is None

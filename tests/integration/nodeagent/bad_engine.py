"""A program in place of vLLM's, which fails in the way that its served model is named after.

vllm serve FOLDER --port PORT --served-model-name FAULT
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MIB = 1 << 20
LAST_WORDS = {
    "no-memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "unloadable": "safetensors_rust.SafetensorError: Error while deserializing header",
    "unknown-option": "vllm serve: error: unrecognized arguments: --new-option",
}
NOISE_LINE = "x" * 1000
held: list[bytearray] = []
stuck = threading.Event()
"""Set once a step hangs: then no request gets a token any more."""


class Handler(BaseHTTPRequestHandler):
    """Answers the routes that the agent uses."""

    fault = ""
    protocol_version = "HTTP/1.1"
    answers = 0

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.reply(200, f"vllm:generation_tokens_total {Handler.answers}\n".encode())
        else:
            self.reply(503 if self.fault == "never-ready" else 200, b"")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.fault == "garbage" or (self.fault == "later-garbage" and Handler.answers):
            self.reply(200, b"\x00 no answer")
            return
        if self.fault == "broken-weights":
            self.reply(500, b'{"error": "the model gave no finite logits"}')
            return
        if self.fault == "errors" and Handler.answers:
            self.reply(500, b'{"error": "EngineDeadError"}')
            return
        if self.fault == "no-template" and self.path == "/v1/chat/completions":
            self.reply(400, b'{"error": "no chat template"}')
            return
        if self.fault == "hang" and body["max_tokens"] > 1:
            stuck.set()
        if stuck.is_set():
            threading.Event().wait()
        Handler.answers += 1
        message = {"role": "assistant", "content": f"by {self.fault}"}
        self.reply(200, json.dumps({"choices": [{"index": 0, "message": message}]}).encode())
        if self.fault == "grow":
            held.append(bytearray(os.urandom(MIB) * 384))
        if self.fault == "forks":
            command = [sys.executable, "-c", "import time; time.sleep(3600)", sys.argv[0]]
            subprocess.Popen(command)
            subprocess.Popen(command, start_new_session=True)
            nowhere = subprocess.DEVNULL
            subprocess.Popen(command, start_new_session=True, stdout=nowhere, stderr=nowhere)
            os.kill(os.getpid(), signal.SIGKILL)

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Write no access log."""


class SharedPortServer(ThreadingHTTPServer):
    """Lets other processes listen on its port, as vLLM does."""

    daemon_threads = True

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        super().server_bind()


def make_noise() -> None:
    """Print a megabyte a second."""
    while True:
        for _ in range(100):
            print(NOISE_LINE, flush=True)
        time.sleep(0.1)


def main() -> None:
    arguments = dict(zip(sys.argv, sys.argv[1:], strict=False))
    fault = Handler.fault = arguments["--served-model-name"]
    if fault in LAST_WORDS:
        print(LAST_WORDS[fault], "\nThe engine core did not start.\nINFO shutting down")
        sys.exit(1)
    if fault == "silent":
        sys.exit(3)
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if fault == "noisy":
        threading.Thread(target=make_noise, daemon=True).start()
    SharedPortServer(("127.0.0.1", int(arguments["--port"])), Handler).serve_forever()


if __name__ == "__main__":
    main()

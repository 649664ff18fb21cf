"""A server of an operator's own for test_command_engine.py: one request at a time, and a child.

Usage: own_server.py --port PORT --model FOLDER --says WORD
"""

import json
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Transcribes any sound as its model's name, the number of its bytes and a word."""

    def _answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        """Answer `/up` and `/numbers`, and nothing else."""
        if self.path == "/numbers":
            self._answer(200, b"# TYPE own_requests counter\nown_requests 7\n", "text/plain")
        else:
            self._answer(200 if self.path == "/up" else 404, b"{}")

    def do_POST(self) -> None:
        """Answer a form with a file, after the seconds in its field `prompt`."""
        body = self.rfile.read(int(self.headers["content-length"]))
        boundary = self.headers["content-type"].partition("boundary=")[2].strip('"').encode()
        fields: dict[str, bytes] = {}
        for part in body.split(b"--" + boundary)[1:-1]:
            head, _, value = part.partition(b"\r\n\r\n")
            name = head.decode().partition('name="')[2].partition('"')[0]
            fields[name] = value[:-2]
        time.sleep(float(fields.get("prompt") or 0))
        model, size, word = fields["model"].decode(), len(fields["file"]), ARGUMENTS["--says"]
        self._answer(200, json.dumps({"text": f"{model} {size} {word}"}).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


ARGUMENTS = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", ARGUMENTS["--says"]])
HTTPServer(("127.0.0.1", int(ARGUMENTS["--port"])), Handler).serve_forever()

"""`/ai/tomarkdown` through the router: a real document converter, confined."""

import asyncio
import io
import os
import signal
import sys
import zipfile
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from isochrone.service.trust.landlock import landlock_version
from isochrone.wire.errors import ApiError
from isochrone.wire.ids import TenantId
from isochrone.wire.peers.routes import KeyLimits
from router.documents import converter as converter_module
from router.documents.converter import AT_ONCE_MAX, DocumentConverter
from tests.integration.router.fleet_of import Bench, a_bench
from tests.system.harness import until

needs_landlock = pytest.mark.skipif(
    landlock_version() < 1, reason="needs a kernel with Landlock (Linux 5.13)"
)


async def convert(
    bench: Bench,
    *files: tuple[str, bytes],
    field: str = "files",
    content_type: str | None = None,
    **fields: str,
) -> tuple[int, Any]:
    form = aiohttp.FormData(fields)
    for name, content in files:
        form.add_field(field, io.BytesIO(content), filename=name, content_type=content_type)
    url = f"{bench.url}/client/v4/accounts/acme/ai/tomarkdown"
    async with bench.http.post(url, data=form) as response:
        return response.status, await response.json()


@needs_landlock
@pytest.mark.parametrize("field", ["files[]", "files[0]"])
async def test_files_may_be_named_as_the_official_sdks_do(tmp_path: Path, field: str) -> None:
    async with a_bench(tmp_path) as bench:
        status, answer = await convert(bench, ("program.exe", b"MZ"), field=field)
        assert (status, answer["result"][0]["format"]) == (200, "error")
        assert (await convert(bench, ("a.csv", b"x"), field="file"))[0] == 400


@needs_landlock
async def test_documents_become_markdown_and_damaged_ones_an_error(tmp_path: Path) -> None:
    pytest.importorskip("markitdown")
    async with a_bench(tmp_path) as bench:
        status, answer = await convert(
            bench,
            ("page.HTML", b"<h1>Title</h1><p>Text <b>in bold</b></p>"),
            ("rows.csv", b"name,count\nx,1\n"),
            ("broken.docx", b"PK\x03\x04 no archive"),
            ("program.exe", b"MZ"),
        )
        assert (status, answer["success"]) == (200, True)
        page, rows, broken, program = answer["result"]
        assert (page["format"], page["mimeType"]) == ("markdown", "text/html")
        assert page["data"] == "# Title\n\nText **in bold**"
        assert page["tokens"] > 0
        assert "| x | 1 |" in rows["data"]
        assert (broken["format"], program["format"]) == ("error", "error")
        assert "does not end in one of" in program["error"]


@needs_landlock
async def test_text_is_read_in_the_charset_of_its_content_type(tmp_path: Path) -> None:
    pytest.importorskip("markitdown")
    text = "déjà vu à Noël"
    async with a_bench(tmp_path) as bench:
        _, answer = await convert(bench, ("a.txt", text.encode("latin-1")))
        assert answer["result"][0]["data"] == text
        page = ("a.html", b"<p>\xc1</p>")
        _, answer = await convert(bench, page, content_type="text/html; charset=koi8-r")
        assert answer["result"][0]["data"] == "а"
        _, answer = await convert(bench, page, content_type="text/html; charset=martian")
        assert "unknown encoding: martian" in answer["result"][0]["error"]
        status, _ = await convert(bench, page, content_type='text/html; charset="a b"')
        assert status == 400


@needs_landlock
async def test_a_bomb_ends_with_an_error(tmp_path: Path) -> None:
    pytest.importorskip("markitdown")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", b"<w:p>" + b"a" * (3 * 1024**3 // 64))
        archive.writestr("[Content_Types].xml", b" " * (1024**3))
    async with a_bench(tmp_path) as bench:
        status, answer = await convert(bench, ("bomb.docx", packed.getvalue()))
        assert status == 200
        assert answer["result"][0]["format"] == "error"


@needs_landlock
async def test_a_confined_process_reads_no_other_file_and_writes_none(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    program = f"""
import socket
from router.documents.sandbox import confine
confine()
def tried(act):
    try:
        act()
        return "done"
    except OSError as error:
        return type(error).__name__
print(tried(lambda: open({str(secret)!r}).read()),
      tried(lambda: open({str(tmp_path / "new")!r}, "w")),
      tried(lambda: open("/etc/passwd").read()),
      tried(lambda: socket.create_connection(("127.0.0.1", 9), 1)))
"""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    output, _ = await process.communicate()
    assert output.decode().split()[:3] == ["PermissionError"] * 3
    assert output.decode().split()[3] in ("PermissionError", "ConnectionRefusedError")


@pytest.mark.skipif(landlock_version() < 6, reason="needs Linux 6.12")
async def test_a_confined_process_connects_to_no_abstract_socket(tmp_path: Path) -> None:
    program = """
import os, socket
outside = socket.socket(socket.AF_UNIX)
outside.bind("")
outside.listen()
from router.documents.sandbox import confine
confine()
try:
    socket.socket(socket.AF_UNIX).connect(outside.getsockname())
except PermissionError:
    print("refused")
"""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    output, _ = await process.communicate()
    assert output == b"refused\n"


async def test_a_converter_gets_no_secret_of_the_routers_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    program = "import json, os; print(json.dumps({'data': ' '.join(os.environ.values())}))"
    converter = DocumentConverter(lambda _: [sys.executable, "-c", program])
    converted = await converter.convert(TenantId("acme"), "a.txt", b"")
    assert converted.data
    assert "secret" not in converted.data


async def test_a_converter_that_dies_or_babbles_is_an_error() -> None:
    for program in ("import os; os.abort()", "print('x' * 100)"):
        converter = DocumentConverter(lambda _, program=program: [sys.executable, "-c", program])  # type: ignore[misc]
        assert (await converter.convert(TenantId("acme"), "a.txt", b"")).error


async def test_a_converter_that_writes_without_end_is_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that it wrote in 50 s was in the router's memory."""
    monkeypatch.setattr(converter_module, "OUTPUT_BYTES_MAX", 1 << 20)
    program = "while True: print('x' * 65536)"
    converter = DocumentConverter(lambda _: [sys.executable, "-c", program])
    async with asyncio.timeout(30):
        assert (await converter.convert(TenantId("acme"), "a.txt", bytes(1 << 20))).error


async def test_a_killed_process_of_a_document_is_an_error_and_others_go_on(tmp_path: Path) -> None:
    """SIGKILL, as by the kernel when memory is short."""
    pid_file = tmp_path / "pid"
    waits = (
        f"import os, sys; open({str(pid_file)!r}, 'w').write(str(os.getpid())); sys.stdin.read()"
    )
    programs = {".txt": f"{waits}; import time; time.sleep(60)", ".md": 'print(\'{"data": "x"}\')'}
    converter = DocumentConverter(lambda extension: [sys.executable, "-c", programs[extension]])
    killed = asyncio.create_task(converter.convert(TenantId("acme"), "a.txt", bytes(1 << 20)))

    async def has_begun() -> bool:
        return pid_file.exists() and bool(pid_file.read_text())

    await until("the process runs", has_begun)
    os.kill(int(pid_file.read_text()), signal.SIGKILL)
    assert (await killed).error
    assert (await converter.convert(TenantId("acme"), "a.md", b"")).data == "x"


async def test_a_process_that_cannot_be_started_is_a_reason_to_ask_again(tmp_path: Path) -> None:
    converter = DocumentConverter(lambda _: [str(tmp_path / "missing")])
    for _ in range(AT_ONCE_MAX + 1):  # it gives back its turn
        with pytest.raises(ApiError, match="cannot start a process") as refused:
            await converter.convert(TenantId("acme"), "a.txt", b"")
        assert refused.value.retry_after_s


@pytest.mark.parametrize(
    ("files", "fields", "said"),
    [
        ((("a.txt", b"x"),), {"colour": "red"}, "no field 'colour'"),
        ((("a.txt", b"x"),), {"conversionOptions": '{"pdf":{}}'}, "'pdf'"),
        ((("a.txt", b"x"),) * 9, {}, "more than 8 files"),
    ],
)
async def test_a_form_that_cannot_be_used_is_refused(
    tmp_path: Path, files: tuple[tuple[str, bytes], ...], fields: dict[str, str], said: str
) -> None:
    async with a_bench(tmp_path) as bench:
        status, answer = await convert(bench, *files, **fields)
        assert (status, answer["errors"][0]["code"]) == (400, 5006)
        assert said in answer["errors"][0]["message"]


async def test_a_request_without_a_content_type_is_refused(tmp_path: Path) -> None:
    async with (
        a_bench(tmp_path) as bench,
        bench.http.post(
            f"{bench.url}/ai/tomarkdown", skip_auto_headers=["content-type"]
        ) as response,
    ):
        assert response.status == 400
        assert "multipart/form-data" in (await response.json())["errors"][0]["message"]


async def test_no_form_a_limited_key_and_the_formats(tmp_path: Path) -> None:
    async with a_bench(tmp_path, limits=KeyLimits(requests_per_min=1)) as bench:
        url = f"{bench.url}/ai/tomarkdown"
        async with bench.http.get(f"{url}/supported") as response:
            rows = (await response.json())["result"]
            assert {"extension": ".pdf", "mimeType": "application/pdf"} in rows
        async with bench.http.post(url, json={}) as response:
            assert response.status == 400
        async with bench.http.post(url, json={}) as response:
            assert response.status == 429
            assert int(response.headers["retry-after"]) >= 1

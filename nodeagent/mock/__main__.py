"""`python -m nodeagent.mock --config FILE.json`: the mock engine as a process."""

import sys
from pathlib import Path

import msgspec
import uvloop

from isochrone.service.logs import setup_logs
from isochrone.wire.engines.engine import EngineConfig
from nodeagent.mock.engine import MockEngine
from nodeagent.mock.server import MockServer


def main() -> None:
    """Serve numbered tokens until SIGTERM."""
    setup_logs("mock-engine")
    path = Path(sys.argv[sys.argv.index("--config") + 1])
    config = msgspec.json.decode(path.read_bytes(), type=EngineConfig)
    if "fail_load" in config.options:
        sys.stderr.write("cannot load the model: option fail_load is set\n")
        raise SystemExit(1)
    beside = config.options.get("out_of_memory_beside")
    if beside and Path(beside).exists():
        sys.stderr.write("torch.OutOfMemoryError: CUDA out of memory\n")
        raise SystemExit(1)

    async def serve() -> None:
        await MockServer(MockEngine(config), config).serve()

    uvloop.run(serve())


if __name__ == "__main__":
    main()

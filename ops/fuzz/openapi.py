"""Sends drawn requests, valid and invalid, to every route of an OpenAPI document (schemathesis).

    python -m ops.fuzz.openapi URL --token KEY [--model NAME] [--examples 200] [--seed 1]

Fails if an answer is a 5xx or is not what the document says: status, type, headers, schema. An
invalid request that succeeds fails too, unless its check is left out. The tests of the admin API
and of the public API do the same with few examples.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

HOOKS: Final = Path(__file__).with_name("openapi_hooks.py")
MODEL: Final = "OPENAPI_MODEL"
CHECKS: Final = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_headers_conformance", "response_schema_conformance", "negative_data_rejection"),
    *("missing_required_header", "unsupported_method", "allow_header_conformance"),
    *("ignored_auth", "use_after_free"),
)
"""All but those that judge what a schema cannot say, such as whether a model exists."""


def command(url: str, token: str, *, examples: int, seed: int, report: Path) -> list[str]:
    """Return the command line that tests the service at `url`."""
    return [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--url", url),
        *("--header", f"Authorization: Bearer {token}", "--checks", ",".join(CHECKS)),
        *("--max-examples", str(examples), "--seed", str(seed)),
        # Its deterministic mode ignores the seed, and so would examples of earlier runs.
        *("--generation-database", "none"),
        *("--continue-on-failure", "--request-timeout", "60", "--no-color", "--warnings", "off"),
        *("--suppress-health-check", "all", "--report", "junit", "--report-dir", str(report)),
    ]


def environment(model: str) -> dict[str, str]:
    """Return the environment of that command; requests name `model` where they name one."""
    return {**os.environ, "SCHEMATHESIS_HOOKS": str(HOOKS), MODEL: model}


def main(arguments: Sequence[str] | None = None) -> int:
    """Test a running service; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("url")
    parser.add_argument("--token", required=True, help="an API key, or the admin token")
    parser.add_argument("--model", default="", help="a model that requests name")
    parser.add_argument("--examples", type=int, default=200, help="for each route")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, default=Path(".state/openapi"))
    given = parser.parse_args(arguments)
    run = command(
        given.url, given.token, examples=given.examples, seed=given.seed, report=given.report
    )
    return subprocess.run(run, env=environment(given.model), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

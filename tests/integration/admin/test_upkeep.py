"""Periodic jobs that a scheduler runs only with certain settings."""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.admin.conftest import Admin
from tests.system.harness import until


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {"batch_folder": tmp_path / "batches"}


async def test_a_scheduler_with_a_folder_of_files_sweeps_it(admin: Admin) -> None:
    async def has_turned() -> bool:
        text = (await admin.ask("GET", "/metrics")).body
        name = 'isochrone_scheduler_job_turns{loop="sweep_contents",outcome="ended"} '
        return any(float(line.removeprefix(name)) for line in text.splitlines() if name in line)

    await until("the first turn", has_turned)

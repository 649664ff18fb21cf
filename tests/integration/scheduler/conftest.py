"""What the tests of schedulers on a real Postgres share."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def leases_can_be_taken(server_older_than_a_lease: None) -> None:
    """Wait once, before the first test."""

"""The stand-ins are put in once for all schedules of a test."""

from collections.abc import Iterator

import pytest

from tests.simulation import roles


@pytest.fixture(scope="module")
def simulation() -> Iterator[None]:
    with roles.installed():
        yield

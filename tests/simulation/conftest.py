"""The stand-ins are put in once for all schedules of a test."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def simulation() -> Iterator[None]:
    from tests.simulation import roles  # the pure tests here need no torch

    with roles.installed():
        yield

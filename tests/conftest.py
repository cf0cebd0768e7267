"""What tests of every room share: marks by folder, time limits by mark, and an end of all that tests started."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

SYSTEM_TESTS = Path(__file__).parent / "system"
MODEL_TIMEOUT_S = 300
"""For tests with real weights; every other test has the limit of pyproject.toml. A test's own mark wins over both."""
KILL_TIMEOUT_S = 10
RUN_ID_VARIABLE = "SPECDEC_TEST_RUN"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if SYSTEM_TESTS in item.path.parents:
            item.add_marker(pytest.mark.system)
        if item.get_closest_marker("model") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(MODEL_TIMEOUT_S))


@pytest.fixture(scope="session", autouse=True)
def nothing_outlives_the_tests() -> Iterator[None]:
    """Kills what is left at the end, orphans too: each process inherits this run's id in its environment.

    Fails the last test where anything was left, since its own test should have ended it.
    """
    run_id = uuid.uuid4().hex
    os.environ[RUN_ID_VARIABLE] = run_id
    yield
    left = [process for process in psutil.process_iter() if _is_of_run(process, run_id)]
    told = []
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            told.append(" ".join(process.cmdline()[:4]))
            process.kill()
    psutil.wait_procs(left, timeout=KILL_TIMEOUT_S)
    if told:
        pytest.fail(f"tests left processes behind, now killed: {told}")


def _is_of_run(process: psutil.Process, run_id: str) -> bool:
    """Whether a process, other than this one and the interpreter's own helpers, was started by this run."""
    try:
        helper = "multiprocessing.resource_tracker" in " ".join(process.cmdline())
        return process.pid != os.getpid() and not helper and process.environ().get(RUN_ID_VARIABLE) == run_id
    except psutil.Error:
        return False


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with random weights: 320 tokens, 8 padding rows, context of 512."""
    from tests.unit.model.tiny import make_tiny_model_dir  # only tests that need a model pay for importing torch

    return make_tiny_model_dir(tmp_path_factory.mktemp("tiny_model"), num_padding_rows=8)

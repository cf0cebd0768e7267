"""The Python example, as a user runs it."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.system.scripted_service import scripted_service

pytestmark = pytest.mark.system

_PROGRAM = Path(__file__).resolve().parents[2] / "clients" / "python" / "generate.py"


async def test_python_client_prints_the_text_and_says_why_it_ended() -> None:
    async with scripted_service() as (service, endpoint), asyncio.timeout(60):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(_PROGRAM), endpoint, "say two words"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        stdout, stderr = await process.communicate()
    assert (process.returncode, stdout.decode()) == (0, "two wörds held back\n")
    assert stderr.decode() == "FINISH_REASON_LENGTH: 2 tokens\n"
    assert service.requests[0].spec.chat.messages[0].content == "say two words"


def test_python_client_fits_on_a_page() -> None:
    assert len(_PROGRAM.read_text().splitlines()) <= 30

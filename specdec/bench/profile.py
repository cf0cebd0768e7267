"""Where a server process spends its time, sampled from outside by py-spy. Knows that tool's raw format alone."""

import asyncio
import contextlib
import shutil
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

RATE_HZ = 200
_MAX_DURATION_S = 3600
_STOP_TIMEOUT_S = 30.0
NUM_SHOWN = 10


class ProfilerError(Exception):
    """py-spy is not there, or may not look into the process. The message is for people."""


def find_profiler() -> str:
    """Beside our own interpreter, or on PATH. Raises ProfilerError."""
    found = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if found is None:
        raise ProfilerError("profiling needs py-spy: pip install py-spy")
    return found


@contextlib.asynccontextmanager
async def profiled(profiler: str, pid: int, path: Path) -> AsyncIterator[None]:
    """Samples whichever thread of a process holds the interpreter, and writes stacks and counts to `path` at the end.

    Compiled loops and sleeps, which let it go, are not in it.
    """
    arguments = ["record", "--pid", str(pid), "--rate", str(RATE_HZ), "--duration", str(_MAX_DURATION_S)]
    process = await asyncio.create_subprocess_exec(
        *(profiler, *arguments, "--gil", "--threads", "--format", "raw", "--output", str(path)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                _, said = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            said = b""
    if process.returncode != 0:
        raise ProfilerError(f"py-spy wrote nothing: {said.decode(errors='replace').strip()[-200:]}")


def read_profile(path: Path) -> dict[str, Any]:
    return summarise(path.read_text(encoding="utf-8"))


def summarise(text: str) -> dict[str, Any]:
    """Shares of all samples: by thread, by the function that ran, and by functions of ours that were on the stack."""
    threads, own, total = Counter[str](), Counter[str](), Counter[str]()
    num_samples = 0
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        if not count.isdigit():
            continue
        thread, *frames = stack.split(";")
        functions = [frame.rpartition(":")[0] + ")" for frame in frames]
        num_samples += int(count)
        threads[thread.partition(": ")[2] or thread] += int(count)
        if functions:
            own[functions[-1]] += int(count)
        for function in set(filter(_is_ours, functions)):
            total[function] += int(count)
    return {
        "num_samples": num_samples,
        "rate_hz": RATE_HZ,
        "threads": _shares(threads, num_samples),
        "own": _shares(own, num_samples),
        "total": _shares(total, num_samples),
    }


def _is_ours(function: str) -> bool:
    return function.partition("(")[2].startswith(("specdec/", "verifier_service/"))


def _shares(counts: Counter[str], num_samples: int) -> dict[str, float]:
    return {name: round(count / num_samples, 4) for name, count in counts.most_common(NUM_SHOWN)}

"""The other program's process as the benchmark sees it: starts it, asks it, a line of JSON each way. Knows no torch."""

import asyncio
import contextlib
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from specdec.bench.records import PeerGeneration, TopTwo

DTYPES = ("auto", "bfloat16", "float16", "float32")
GREEDY = "transformers_greedy"
PROMPT_LOOKUP = "transformers_prompt_lookup"
ASSISTED_MODES = ("transformers_assisted", "transformers_assisted_4")
MODES = (GREEDY, *ASSISTED_MODES, PROMPT_LOOKUP)

_MAX_LINE_BYTES = 16 * 1024 * 1024
_CLOSE_TIMEOUT_S = 10.0


class PeerError(Exception):
    """The other program failed, ended or took too long."""


@dataclasses.dataclass(frozen=True)
class PeerOptions:
    """`target` and `draft` are names as our own roles take them; without a draft there is no assisted generation."""

    target: str
    draft: str | None
    device: str
    dtype: str
    log_path: Path
    start_timeout_s: float
    answer_timeout_s: float

    @property
    def modes(self) -> tuple[str, ...]:
        return MODES if self.draft is not None else tuple(mode for mode in MODES if mode not in ASSISTED_MODES)


class TransformersPeer:
    """Plain `transformers` in a process of its own, which loads target and draft once. One question at a time.

    Every call raises PeerError.
    """

    def __init__(self, options: PeerOptions) -> None:
        self.settings: Mapping[str, Any] = {}
        self._options = options
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise PeerError("not started")
        return self._process.pid

    @property
    def modes(self) -> tuple[str, ...]:
        return self._options.modes

    async def __aenter__(self) -> Self:
        options = self._options
        arguments = ["--target", options.target, "--device", options.device, "--dtype", options.dtype]
        if options.draft is not None:
            arguments += ["--draft", options.draft]
        with options.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "specdec.bench.peer_worker", *arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=_MAX_LINE_BYTES,
                process_group=0,  # a terminal's Ctrl-C is for the benchmark, which ends this one
            )
        try:
            self.settings = await self._receive(options.start_timeout_s)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def generate(self, mode: str, prompt: str, max_new_tokens: int) -> PeerGeneration:
        """One greedy output for a prompt that is the first turn of a chat."""
        answer = await self._ask(do="generate", mode=mode, prompt=prompt, max_new_tokens=max_new_tokens)
        return PeerGeneration(tuple(answer["token_ids"]), answer["num_prompt_tokens"], answer["elapsed_s"])

    async def top_two(self, prompt: str, output_token_ids: Sequence[int]) -> TopTwo:
        """The likeliest tokens after this prompt and these output tokens."""
        answer = await self._ask(do="top_two", prompt=prompt, output_token_ids=list(output_token_ids))
        return TopTwo(tuple(answer["token_ids"]), tuple(answer["logits"]))

    async def _ask(self, **question: Any) -> dict[str, Any]:
        if self._process is None or self._process.stdin is None:
            raise PeerError("not started")
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            await self._process.stdin.drain()
        except OSError as error:
            raise PeerError(f"the peer process is gone; see {self._options.log_path}") from error
        return await self._receive(self._options.answer_timeout_s)

    async def _receive(self, timeout_s: float) -> dict[str, Any]:
        if self._process is None or self._process.stdout is None:
            raise PeerError("not started")
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), timeout_s)
        except TimeoutError:
            raise PeerError(f"the peer process did not answer within {timeout_s:g} s") from None
        if not line:
            raise PeerError(f"the peer process ended; see {self._options.log_path}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(str(answer["error"]))
        return answer

    async def _stop(self) -> None:
        """End of input ends it between two answers; a running one is cut short."""
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _CLOSE_TIMEOUT_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

"""`specdec generate` as a process, against a scripted server."""

import asyncio
import json
import socket
import sys

import pytest

from tests.system.scripted_service import scripted_service

pytestmark = pytest.mark.system

KEYS = {
    *("model", "seed", "acceptance_rule", "numerics_fingerprint"),
    *("text", "token_ids", "finish_reason", "usage", "speculative", "num_failovers", "numerics_changed"),
}


async def generate(*arguments: str, stdin: bytes = b"") -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "specdec.cli.main", "generate", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(stdin), 60)
    return process.returncode, out.decode(), err.decode()


async def test_text_streams_to_stdout_and_nothing_else_does() -> None:
    async with scripted_service() as (_, endpoint):
        assert await generate("hi", "--endpoint", endpoint) == (0, "two wörds held back", "")


async def test_the_prompt_comes_from_stdin_and_options_reach_the_server() -> None:
    async with scripted_service() as (service, endpoint):
        options = [
            "--raw",
            "--max-new-tokens",
            "7",
            "--temperature",
            "0.5",
            "--seed",
            "3",
            "--stop",
            "a",
            "--stop",
            "b",
        ]
        code, _, _ = await generate("-", "--endpoint", endpoint, *options, "--no-speculation", stdin="grüß".encode())
        assert code == 0
        spec = service.requests[0].spec
        assert (spec.text, spec.stop.max_new_tokens, list(spec.stop.stop_strings)) == ("grüß", 7, ["a", "b"])
        assert (spec.sampling.temperature, spec.sampling.seed) == (0.5, 3)
        assert spec.speculation.disabled


async def test_a_prompt_is_a_chat_turn_unless_it_is_raw() -> None:
    async with scripted_service() as (service, endpoint):
        await generate("hi", "--endpoint", endpoint)
        [turn] = service.requests[0].spec.chat.messages
        assert (turn.role, turn.content) == ("user", "hi")


async def test_json_is_one_object_with_the_promised_keys() -> None:
    async with scripted_service() as (_, endpoint):
        code, out, _ = await generate("hi", "--endpoint", endpoint, "--json")
        written = json.loads(out)
        assert code == 0
        assert set(written) == KEYS
        assert (written["text"], written["token_ids"]) == ("two wörds held back", [5, 6, 7])


async def test_samples_are_shown_one_after_another_in_order() -> None:
    async with scripted_service() as (service, endpoint):
        shown = await generate("hi", "--endpoint", endpoint, "--samples", "3")
        assert shown == (
            0,
            "--- sample 0 ---\ntwo wörds held back\n"
            "--- sample 1 ---\ntwo wörds held back1\n"
            "--- sample 2 ---\ntwo wörds held back2\n",
            "",
        )
        assert service.requests[0].spec.num_samples == 3


async def test_samples_in_json_are_one_object_each() -> None:
    async with scripted_service() as (_, endpoint):
        _, out, _ = await generate("hi", "--endpoint", endpoint, "--samples", "2", "--json")
        written = json.loads(out)
        assert set(written) == {"samples"}
        assert [sample["text"] for sample in written["samples"]] == ["two wörds held back", "two wörds held back1"]
        assert set(written["samples"][0]) == KEYS


async def test_log_probabilities_stand_behind_the_text_in_a_line_for_each_token() -> None:
    async with scripted_service() as (service, endpoint):
        code, out, _ = await generate("hi", "--endpoint", endpoint, "--logprobs", "1", "--prompt-logprobs", "0")
        assert (code, out.splitlines()) == (
            0,
            [
                "two wörds held back",
                "log-probabilities of the prompt:",
                "     1    -0.1250  1  [9 -0.5000]",
                "     2    -0.2500  2  [9 -0.5000]",
                "log-probabilities of the output:",
                "     3    -0.6250  5 'two '  [9 -0.5000]",
                "     4    -0.7500  6 'wörds'  [9 -0.5000]",
                "     5    -0.8750  7 ''  [9 -0.5000]",
            ],
        )
        spec = service.requests[0].spec
        assert (spec.num_logprobs, spec.num_prompt_logprobs) == (1, 0)
        assert spec.HasField("num_prompt_logprobs")


async def test_log_probabilities_in_json_stand_beside_the_token_ids() -> None:
    async with scripted_service() as (_, endpoint):
        _, out, _ = await generate("hi", "--endpoint", endpoint, "--logprobs", "1", "--json")
        written = json.loads(out)
        assert [position["token_id"] for position in written["logprobs"]] == written["token_ids"]
        assert written["logprobs"][0] == {
            "token_id": 5,
            "logprob": -0.625,
            "alternatives": [{"token_id": 9, "logprob": -0.5}],
        }
        assert [position["token_id"] for position in written["prompt_logprobs"]] == [1, 2]


async def test_a_tenant_travels_with_the_request() -> None:
    async with scripted_service() as (service, endpoint):
        await generate("hi", "--endpoint", endpoint, "--tenant", "team-a")
        await generate("hi", "--endpoint", endpoint)
        assert service.tenants == ["team-a", ""]


async def test_show_drafts_ends_with_a_legend() -> None:
    async with scripted_service() as (_, endpoint):
        code, out, _ = await generate("hi", "--endpoint", endpoint, "--show-drafts")
        assert code == 0
        assert "\x1b[32mtwo \x1b[0m\x1b[1;31mwörds\x1b[0m held back" in out
        assert "drafted and accepted: 1" in out
        assert "corrected by the target: 1" in out


async def test_no_server_there_is_one_line_and_code_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, never listening: connections are refused
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        assert await generate("hi", "--endpoint", endpoint) == (
            1,
            "",
            f"error: no server answers at {endpoint} (PEER_UNAVAILABLE)\n",
        )

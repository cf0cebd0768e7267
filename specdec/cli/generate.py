"""`specdec generate`: asks a running system for one output, or several samples, and streams them."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from specdec.cli.access import Access, InsecureToken, Tls, TlsCa, Token, TokenFile, read_access
from specdec.cli.failures import UsageError, told_in_one_line
from specdec.params import (
    AcceptanceRule,
    ChatMessage,
    GenerationSpec,
    Prompt,
    SamplingParams,
    SpeculationOptions,
    StopCriteria,
    validate_tenant,
)

if TYPE_CHECKING:
    from specdec.cli.answer import Answer
    from specdec.cli.generation_view import GenerationView
    from specdec.errors import SpecdecError

DEFAULT_ENDPOINT = "127.0.0.1:50050"


def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer; - reads it from standard input.")],
    endpoint: Annotated[
        str,
        typer.Option(envvar="SPECDEC_ENDPOINT", help="The orchestrator; of several, with commas, one after the other."),
    ] = DEFAULT_ENDPOINT,
    model: Annotated[str, typer.Option(help="Target model; empty for the only one there is.")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="Most output tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the most likely tokens that reach this sum.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this fraction of the most likely one.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Fixes the noise; without one the server draws it.")] = None,
    rule: Annotated[str | None, typer.Option(help="greedy, coupled, one_hot or rejection.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this string; may be given again.")] = None,
    chat: Annotated[bool, typer.Option("--chat/--raw", help="With the model's chat template, or as it is.")] = True,
    speculation: Annotated[
        bool, typer.Option("--speculation/--no-speculation", help="Whether a drafter may help.")
    ] = True,
    samples: Annotated[int, typer.Option(help="Outputs for the prompt, each with its own noise.")] = 1,
    logprobs: Annotated[
        int | None, typer.Option(help="Tell each token's log-probability, and those of so many alternatives.")
    ] = None,
    prompt_logprobs: Annotated[int | None, typer.Option(help="The same for the prompt's tokens.")] = None,
    tenant: Annotated[str, typer.Option(envvar="SPECDEC_TENANT", help="Whom the request is for.")] = "",
    tls: Tls = None,
    tls_ca: TlsCa = None,
    token: Token = None,
    token_file: TokenFile = None,
    insecure_token: InsecureToken = False,
    show_drafts: Annotated[bool, typer.Option("--show-drafts", help="Colour tokens by how they came about.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object at the end, no stream.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds for the whole output.")] = 600.0,
) -> None:
    """Stream one answer from a running system."""
    with told_in_one_line():
        spec = GenerationSpec(
            prompt=_prompt(prompt, chat=chat),
            model=model,
            sampling=SamplingParams(
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                seed=seed,
                acceptance_rule=_rule(rule),
            ),
            stop=StopCriteria(max_new_tokens=max_new_tokens, stop_strings=tuple(stop or ())),
            speculation=SpeculationOptions(disabled=not speculation),
            num_samples=samples,
            num_logprobs=logprobs,
            num_prompt_logprobs=prompt_logprobs,
        ).validated()
        validate_tenant(tenant)
        endpoints = [part.strip() for part in endpoint.split(",") if part.strip()] or [endpoint]
        accesses = [
            read_access(each, tls=tls, tls_ca=tls_ca, token=token, token_file=token_file, insecure_token=insecure_token)
            for each in endpoints
        ]
        view = _view(spec, show_drafts=show_drafts, quiet=as_json)
        answers = asyncio.run(_stream(endpoints, tenant, accesses, spec, timeout_s, view))
        if as_json:
            written = [answer.to_json() for answer in answers]
            print(json.dumps(written[0] if samples == 1 else {"samples": written}, ensure_ascii=False))


async def _stream(
    endpoints: Sequence[str],
    tenant: str,
    accesses: Sequence[Access],
    spec: GenerationSpec,
    timeout_s: float,
    view: "GenerationView",
) -> Sequence["Answer"]:
    """Raises SpecdecError for what cannot be resumed."""
    from specdec.cli.answer import collect_samples
    from specdec.cli.client import GenerationClient
    from specdec.cli.resuming_client import ResumingClient

    async with contextlib.AsyncExitStack() as stack:
        replicas = [
            await stack.enter_async_context(GenerationClient(each, timeout_s=timeout_s, tenant=tenant, access=access))
            for each, access in zip(endpoints, accesses, strict=True)
        ]
        client = ResumingClient(replicas, on_break=_tell_break)
        return await collect_samples(client.generate(spec), spec.num_samples, view.show, view.close)


def _tell_break(error: "SpecdecError") -> None:
    print(f"\n{error.reason}: {error.message}; going on", file=sys.stderr)


def _view(spec: GenerationSpec, *, show_drafts: bool, quiet: bool) -> "GenerationView":
    from specdec.cli.generation_view import DraftView, LogprobsView, PlainView, QuietView, SamplesView

    if quiet:
        return QuietView()

    def view_of_one() -> "GenerationView":
        view = DraftView(no_color="NO_COLOR" in os.environ) if show_drafts else PlainView()
        return view if spec.num_logprobs is None and spec.num_prompt_logprobs is None else LogprobsView(view)

    return view_of_one() if spec.num_samples == 1 else SamplesView(spec.num_samples, view_of_one)


def _prompt(argument: str, *, chat: bool) -> Prompt:
    text = sys.stdin.read() if argument == "-" else argument
    return (ChatMessage("user", text),) if chat and text else text


def _rule(name: str | None) -> AcceptanceRule | None:
    if name is None:
        return None
    try:
        return AcceptanceRule(name.upper())
    except ValueError:
        known = ", ".join(rule.value.lower() for rule in AcceptanceRule)
        raise UsageError(f"no acceptance rule {name!r}; there are {known}") from None

"""`specdec demo`: starts everything, answers three prompts with speculation off and on, and holds the two against each
other. Greedy, so that equal ids are what is promised."""

import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.cli.cluster_options import ClusterOptions
from specdec.cli.failures import EXIT_FAILED, UsageError, fail, told_in_one_line
from specdec.params import ChatMessage, GenerationSpec, SamplingParams, SpeculationOptions, StopCriteria

if TYPE_CHECKING:
    from specdec.cli.answer import Answer
    from specdec.cli.client import GenerationClient

_WARM_UP_TOKENS = 8
_MODEL_WAIT_S = 60.0


@dataclasses.dataclass(frozen=True)
class DemoResult:
    """One prompt, both ways."""

    prompt: str
    target_only: "Answer"
    speculative: "Answer"

    @property
    def identical(self) -> bool:
        return self.target_only.token_ids == self.speculative.token_ids

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "text": self.speculative.text,
            "token_ids": list(self.speculative.token_ids),
            "identical": self.identical,
            "target_only_tokens_per_s": self.target_only.tokens_per_s,
            "speculative_tokens_per_s": self.speculative.tokens_per_s,
            "acceptance_rate": self.speculative.acceptance_rate,
            "acceptance_length": self.speculative.acceptance_length,
        }


def demo(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    model: Annotated[str, typer.Option(help="The target.")] = "smollm2-135m",
    proposer: Annotated[str, typer.Option(help="ngram, draft_model or stacked.")] = "ngram",
    draft_model: Annotated[str | None, typer.Option(help="For draft_model and stacked.")] = None,
    quantization: Annotated[str | None, typer.Option(help="The draft model's weights: none, int8, int4.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of each answer.")] = 96,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the roles' logs.")] = False,
) -> None:
    """Start everything, answer three prompts with speculation off and on, compare, and stop."""
    with told_in_one_line():
        try:
            options = ClusterOptions(
                model=model, proposer=proposer, draft_model=draft_model, quantization=quantization
            ).validated()
        except ValueError as error:
            raise UsageError(str(error)) from None
        results = asyncio.run(_run(options, max_new_tokens, verbose=verbose))
        if json_path is not None:
            report = {"model": model, "proposer": proposer, "prompts": [result.to_json() for result in results]}
            json_path.write_text(json.dumps(report, ensure_ascii=False) + "\n")
        num_different = sum(not result.identical for result in results)
        print(f"\n{len(results) - num_different} of {len(results)} answers are the same, token for token.")
        if proposer == "ngram":
            print("A lookup guesses from the text so far: it helps where an answer repeats its prompt or itself.")
        if num_different:
            fail(f"{num_different} of {len(results)} answers differ with speculation on", EXIT_FAILED)


async def _run(options: ClusterOptions, max_new_tokens: int, *, verbose: bool) -> list[DemoResult]:
    from specdec.cli.client import GenerationClient
    from specdec.cli.cluster_view import ClusterView
    from specdec.cli.demo_prompts import DEMO_PROMPTS
    from specdec.cli.processes import LocalCluster

    view = ClusterView(verbose=verbose)
    results = []
    cluster = LocalCluster(options, on_progress=view.progress, on_line=view.log_line)
    async with cluster, GenerationClient(cluster.endpoint) as client:
        await client.wait_for_model(_MODEL_WAIT_S)
        await _answer(client, DEMO_PROMPTS[0], _WARM_UP_TOKENS, speculation=True)
        for index, prompt in enumerate(DEMO_PROMPTS):
            print(f"\nprompt {index + 1} of {len(DEMO_PROMPTS)}, with speculation off and on ...", flush=True)
            answers = {}
            for speculation in (False, True) if index % 2 == 0 else (True, False):
                answers[speculation] = await _answer(client, prompt, max_new_tokens, speculation=speculation)
            results.append(DemoResult(prompt, target_only=answers[False], speculative=answers[True]))
            _show(results[-1])
    return results


async def _answer(client: "GenerationClient", prompt: str, max_new_tokens: int, *, speculation: bool) -> "Answer":
    from specdec.cli.answer import collect

    spec = GenerationSpec(
        prompt=(ChatMessage("user", prompt),),
        sampling=SamplingParams(temperature=0.0),
        stop=StopCriteria(max_new_tokens=max_new_tokens),
        speculation=SpeculationOptions(disabled=not speculation),
    )
    return await collect(client.generate(spec))


def _show(result: DemoResult) -> None:
    from specdec.cli.terminal_text import printable

    rate, length = result.speculative.acceptance_rate, result.speculative.acceptance_length
    accepted = "no drafts" if rate is None or length is None else f"{rate:.0%} accepted, {length:.2f} tokens a draft"
    alone, together = result.target_only.tokens_per_s, result.speculative.tokens_per_s
    verdict = "identical token ids" if result.identical else "TOKEN IDS DIFFER"
    print(f"\n> {result.prompt}\n\n{printable(result.speculative.text)}\n")
    speeds = f"target only {alone:.1f} tokens/s, speculative {together:.1f} tokens/s ({together / alone:.2f} times)"
    print(f"{speeds}; {accepted}; {verdict}")
    sys.stdout.flush()

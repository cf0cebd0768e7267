"""What the sessions of a campaign ask: a fixed set of requests over a synthetic model, most of which have one right
answer whatever happens. Pure."""

import dataclasses
import random

from specdec.params import AcceptanceRule, GenerationSpec, SamplingParams, StopCriteria

_FIRST_PROMPT_TOKEN = 300  # past special tokens and bytes
_LAST_PROMPT_TOKEN = 3000
_PROMPT_TOKENS = (24, 96)
_TEMPERATURE = 0.9
_GREEDY_EVERY, _ONE_HOT_EVERY = 2, 8


@dataclasses.dataclass(frozen=True)
class CampaignRequest:
    """`repeatable`: greedy and coupled outputs are the same through any fault; of one_hot it is only promised that no
    token is taken back."""

    number: int
    spec: GenerationSpec

    @property
    def repeatable(self) -> bool:
        return self.spec.sampling.rule in (AcceptanceRule.GREEDY, AcceptanceRule.COUPLED)


def campaign_requests(num_requests: int, num_tokens: int, seed: int) -> list[CampaignRequest]:
    """Half greedy, an eighth one_hot, the rest coupled; prompts of token ids, each of its own, some with a common
    beginning."""
    chance = random.Random(seed)  # noqa: S311 - made-up prompts, not secrets
    common = tuple(chance.randrange(_FIRST_PROMPT_TOKEN, _LAST_PROMPT_TOKEN) for _ in range(_PROMPT_TOKENS[0]))
    requests = []
    for number in range(num_requests):
        own = (
            chance.randrange(_FIRST_PROMPT_TOKEN, _LAST_PROMPT_TOKEN) for _ in range(chance.randint(*_PROMPT_TOKENS))
        )
        prompt = (*(common if chance.random() < 0.5 else ()), *own)
        stop = StopCriteria(max_new_tokens=num_tokens, ignore_end_of_sequence=True)
        requests.append(CampaignRequest(number, GenerationSpec(prompt, sampling=_sampling(number), stop=stop)))
    return requests


def _sampling(number: int) -> SamplingParams:
    if number % _GREEDY_EVERY == 0:
        return SamplingParams(temperature=0.0)
    rule = AcceptanceRule.ONE_HOT if number % _ONE_HOT_EVERY == 1 else AcceptanceRule.COUPLED
    return SamplingParams(temperature=_TEMPERATURE, top_p=0.95, seed=number, acceptance_rule=rule)

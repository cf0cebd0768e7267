"""What the clients of a soak ask and how they behave: drawn from a seed. Pure."""

import dataclasses
import random
from enum import Enum

from specdec.params import GenerationSpec, SamplingParams, StopCriteria

_FIRST_PROMPT_TOKEN, _LAST_PROMPT_TOKEN = 300, 3000


class Ending(Enum):
    """What the client does. Some receive all; others leave or cancel after some tokens."""

    RECEIVE = "RECEIVE"
    DISCONNECT = "DISCONNECT"
    CANCEL = "CANCEL"


@dataclasses.dataclass(frozen=True)
class SoakRequest:
    spec: GenerationSpec
    ending: Ending
    after_tokens: int


def draw_request(chance: random.Random) -> SoakRequest:
    """Short and long, greedy and sampled, one sample and several, with stop strings, log-probabilities, or neither."""
    num_tokens = chance.choice((8, 16, 48, 96, 200))
    prompt = tuple(
        chance.randrange(_FIRST_PROMPT_TOKEN, _LAST_PROMPT_TOKEN) for _ in range(chance.choice((1, 20, 80, 300)))
    )
    spec = GenerationSpec(
        prompt,
        sampling=SamplingParams(temperature=chance.choice((0.0, 0.8)), seed=chance.randrange(1 << 30)),
        stop=StopCriteria(max_new_tokens=num_tokens, stop_strings=("qz", "xu") if chance.random() < 0.2 else ()),
        num_logprobs=chance.choice((None, None, None, 0, 3)),
        num_samples=chance.choice((1, 1, 1, 1, 2, 3)),
    )
    ending = chance.choices((Ending.RECEIVE, Ending.DISCONNECT, Ending.CANCEL), (6, 2, 2))[0]
    return SoakRequest(spec, ending, chance.randrange(num_tokens))

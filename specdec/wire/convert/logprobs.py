"""Log-probabilities of tokens, of output and prompt positions."""

from collections.abc import Iterable

from specdec.messages import PositionLogprobs, PromptLogprobs, TokenLogprob
from specdec.v1 import common_pb2 as pb
from specdec.wire.convert.scalars import natural_from_pb


def position_logprobs_to_pb(positions: Iterable[PositionLogprobs]) -> list[pb.PositionLogprobs]:
    return [
        pb.PositionLogprobs(
            chosen=_token_to_pb(position.chosen), alternatives=[_token_to_pb(token) for token in position.alternatives]
        )
        for position in positions
    ]


def position_logprobs_from_pb(positions: Iterable[pb.PositionLogprobs]) -> tuple[PositionLogprobs, ...]:
    return tuple(
        PositionLogprobs(
            _token_from_pb(position.chosen), tuple(_token_from_pb(token) for token in position.alternatives)
        )
        for position in positions
    )


def prompt_logprobs_to_pb(prompt: PromptLogprobs) -> pb.PromptLogprobs:
    return pb.PromptLogprobs(start_position=prompt.start_position, logprobs=position_logprobs_to_pb(prompt.logprobs))


def prompt_logprobs_from_pb(message: pb.PromptLogprobs) -> PromptLogprobs:
    return PromptLogprobs(
        start_position=natural_from_pb(message.start_position, "start_position"),
        logprobs=position_logprobs_from_pb(message.logprobs),
    )


def _token_to_pb(token: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(token_id=token.token_id, logprob=token.logprob)


def _token_from_pb(message: pb.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(message.token_id, message.logprob)

"""Which part of an output was guessed: a delta's text split by how each token came about, and its colours. Pure."""

import enum
import itertools
from collections.abc import Iterator

from specdec.messages import Delta
from specdec.params import NextTokenKind


class Origin(enum.Enum):
    """How a token came about. Values are what the legend says."""

    ACCEPTED = "drafted and accepted"
    RECOVERED = "corrected by the target"
    BONUS = "bonus after a draft that was accepted whole"
    PLAIN = "decoded without a draft"


STYLES = {Origin.ACCEPTED: "green", Origin.RECOVERED: "bold red", Origin.BONUS: "cyan", Origin.PLAIN: ""}

_ORIGINS = {
    NextTokenKind.RECOVERED: Origin.RECOVERED,
    NextTokenKind.BONUS: Origin.BONUS,
    NextTokenKind.PLAIN: Origin.PLAIN,
}


def split_by_origin(delta: Delta) -> list[tuple[str, Origin | None]]:
    """The parts of the delta's text in order; None where the server does not tell the text of each token."""
    if len(delta.token_texts) != len(delta.token_ids):
        return [(delta.text, None)] if delta.text else []
    marked = zip(delta.token_texts, _origins(delta), strict=True)
    groups = itertools.groupby(marked, key=lambda pair: pair[1])
    parts = [("".join(text for text, _ in group), origin) for origin, group in groups]
    return [(text, origin) for text, origin in parts if text]


def _origins(delta: Delta) -> Iterator[Origin]:
    """Of each token: the accepted draft tokens stand first, the next token last."""
    statistics = delta.round
    next_token = _ORIGINS[statistics.next_token_kind] if statistics.next_token_kind else Origin.ACCEPTED
    for index in range(len(delta.token_ids)):
        yield Origin.ACCEPTED if index < statistics.num_accepted_tokens else next_token

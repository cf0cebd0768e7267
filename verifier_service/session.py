"""One open session as the verifier holds it: its committed tokens, its cache, and how its output ends.

The cache invariant, before each round: `cache.length <= committed_length - 1`. The last committed token is never in the
cache: it is the first row of the next forward. A session that waits for admission holds no block.
"""

import dataclasses
import itertools
import secrets
from collections.abc import Callable, Sequence

from specdec.decoding.history import TokenHistory
from specdec.decoding.noise import Noise
from specdec.decoding.processing import require_possible_token
from specdec.errors import (
    InvalidParameterError,
    MalformedRequestError,
    PromptTooLongError,
    SpecdecError,
    TokenOutOfVocabularyError,
)
from specdec.ids import AttachmentId, Epoch, Round, SessionId
from specdec.messages import OpenSession, SessionEvent
from specdec.model.kv_cache import KVCache
from specdec.model.text import OutputText
from specdec.params import AcceptanceRule, FinishReason, GenerationSpec
from verifier_service.attachment import Attachment
from verifier_service.kept_tokens import Continuation, OutputIdentity, output_identity
from verifier_service.statistics import SpeculationTally

ATTACH_SECRET_BYTES = 32

SessionSink = Callable[[SessionEvent | SpecdecError], None]


@dataclasses.dataclass(frozen=True)
class TargetLimits:
    """What the target model and its cache allow.

    `vocabulary_size` counts logit rows, `num_real_tokens` those that are tokens; `cache_limit` is how many positions
    fit the whole cache, if one session has it all.
    """

    vocabulary_size: int
    num_real_tokens: int
    context_limit: int
    cache_limit: int
    end_token_ids: frozenset[int]


@dataclasses.dataclass(frozen=True)
class EndedTokens:
    """What is left of a round's tokens after the ends were looked for."""

    token_ids: Sequence[int]
    texts: Sequence[str]
    finish_reason: FinishReason | None


class VerifierSession:
    """State of one session. Only the engine's thread touches it."""

    def __init__(
        self,
        command: OpenSession,
        committed_token_ids: Sequence[int],
        max_new_tokens: int,
        cache: KVCache,
        text: OutputText,
        limits: TargetLimits,
        sink: SessionSink,
        arrival: int,
    ) -> None:
        self.session_id: SessionId = command.session_id
        self.tenant = command.tenant
        self._sample_index = command.sample_index
        self.arrival = arrival
        self.epoch: Epoch = command.epoch
        self.owner_nonce = command.owner_nonce
        self.spec: GenerationSpec = command.spec
        self.rule: AcceptanceRule = command.spec.sampling.rule
        self.token_ids = list(committed_token_ids)
        self.prompt_length = command.prompt_length
        self.prompt_token_ids = tuple(committed_token_ids[: command.prompt_length])
        self.history = TokenHistory(self.prompt_token_ids, self.token_ids[self.prompt_length :])
        self.max_new_tokens = max_new_tokens
        is_scored = command.spec.num_prompt_logprobs is not None and not command.committed_token_ids
        self.scored_length = 1 if is_scored else self.prompt_length
        self.num_cached_prompt_tokens = 0
        self.was_admitted = False
        self.cache = cache
        self.sink = sink
        self.attach_secret = secrets.token_bytes(ATTACH_SECRET_BYTES)
        self.round = Round(0)
        self.attachment: Attachment | None = None
        self.last_attachment_id = AttachmentId(0)
        self.last_refused_id = AttachmentId(0)
        speculation = command.spec.speculation
        is_off = speculation.disabled or speculation.max_draft_tokens == 0
        self.tally = SpeculationTally(disabled_reason="REQUESTED" if is_off else "")
        self.draft_budget = 0
        self.gains_slot: int | None = None
        self.last_served = 0
        self.ready_at: float | None = None
        self.last_commit_at: float | None = None
        self.end_token_ids = _end_token_ids(command.spec, limits)
        self._text = text
        self.kept_token_ids: Sequence[int] = ()
        self.kept_epoch = Epoch(0)
        self._untold_text = ""
        replay = self.rule in (AcceptanceRule.ONE_HOT, AcceptanceRule.REJECTION)
        self.noise = Noise(
            seed=command.spec.sampling.seed or 0,
            sample_index=command.sample_index,
            epoch=command.epoch if replay else 0,
        )

    @property
    def committed_length(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncached(self) -> int:
        """Committed tokens that are not in the cache; 1 once the prompt is prefilled."""
        return len(self.token_ids) - self.cache.length

    @property
    def is_scoring(self) -> bool:
        """Whether log-probabilities of the prompt are wanted that are not told yet.

        Those of positions [1, scored_length) are; a prompt for which nobody asked counts as told. The logits of a
        position's token are those of the row before it.
        """
        return self.scored_length < self.prompt_length

    @property
    def adoptable_token_ids(self) -> Sequence[int]:
        """The tokens whose rows need no forward of this session's own if their keys are found in the cache."""
        return self.token_ids[: self.scored_length] if self.is_scoring else self.token_ids

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def output_token_ids(self) -> Sequence[int]:
        return self.token_ids[self.prompt_length :]

    @property
    def identity(self) -> OutputIdentity:
        """What another epoch's output must share with this one's for either to go on from the other."""
        return output_identity(self.tenant, self.prompt_token_ids, self.spec.sampling, self._sample_index)

    @property
    def num_tokens_left(self) -> int:
        """Output tokens that may still come."""
        return self.max_new_tokens - self.num_output_tokens

    def is_news(self, attachment_id: AttachmentId) -> bool:
        """Whether nothing was told of this attachment or a later one: who repeats himself fills no queue."""
        return attachment_id > max(self.last_attachment_id, self.last_refused_id)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Tokens were decided, and are the session's from here on."""
        self.token_ids += token_ids
        self.history.append(token_ids)
        self.round = Round(self.round + 1)

    def end(self, token_ids: Sequence[int]) -> EndedTokens:
        """Cuts a round's tokens at the first end: a stop token, a stop string or the token limit (contract L4).

        Called once for each round: text is pushed through the incremental detokeniser.
        """
        kept: list[int] = []
        texts: list[str] = []
        for token_id in token_ids[: self.num_tokens_left]:
            kept.append(token_id)
            if token_id in self.end_token_ids:
                texts.append("")
                return EndedTokens(kept, texts, FinishReason.STOP_TOKEN)
            step = self._text.push([token_id])
            texts.append(step.text)
            if step.stopped:
                return EndedTokens(kept, texts, FinishReason.STOP_STRING)
        reached_limit = len(kept) == self.num_tokens_left
        return EndedTokens(kept, texts, FinishReason.LENGTH if reached_limit else None)

    def replay_output(self) -> FinishReason | None:
        """Brings the detokeniser to where the committed output ends, and says whether the output had ended there.

        Called once, when a session is opened with output that an earlier owner committed; that text was delivered.
        """
        for token_id in self.output_token_ids:
            if token_id in self.end_token_ids:
                return FinishReason.STOP_TOKEN
            if self._text.push([token_id]).stopped:
                return FinishReason.STOP_STRING
        return FinishReason.LENGTH if self.num_tokens_left <= 0 else None

    def go_on_from(self, continuation: Continuation) -> FinishReason | None:
        """Takes over output that an earlier epoch decided and Opened tells, up to an end that falls into it.

        Called after `replay_output` and before the first round. Its text comes with what is told next.
        """
        if not continuation.token_ids:
            return None
        ended = self.end(continuation.token_ids)
        self.kept_token_ids, self.kept_epoch = tuple(ended.token_ids), continuation.epoch
        self.token_ids += ended.token_ids
        self.history.append(ended.token_ids)
        self._untold_text = "".join(ended.texts)
        return ended.finish_reason

    def take_untold_text(self) -> str:
        """Text of tokens that were told in Opened. Once."""
        text, self._untold_text = self._untold_text, ""
        return text

    def last_text(self, reason: FinishReason) -> str:
        """Text that was not told yet: of tokens that Opened told, and what was held back for a stop string or an
        unfinished character that will not come any more."""
        held_back = "" if reason is FinishReason.STOP_STRING else self._text.flush()
        return self.take_untold_text() + held_back


def _end_token_ids(spec: GenerationSpec, limits: TargetLimits) -> frozenset[int]:
    """Without padding rows, which are never produced."""
    own = frozenset() if spec.stop.ignore_end_of_sequence else limits.end_token_ids
    return frozenset(token_id for token_id in own.union(spec.stop.stop_token_ids) if token_id < limits.num_real_tokens)


def check_request(
    command: OpenSession, committed_token_ids: Sequence[int], limits: TargetLimits, default_max_new_tokens: int
) -> int:
    """Checks what only the target's owner can check. Returns the most output tokens in force.

    Raises:
        MalformedRequestError: the committed tokens do not begin with a prompt, or there are too many.
        TokenOutOfVocabularyError: a committed token, of the prompt or the output, or a recorded one is none of the
            model's.
        PromptTooLongError: prompt and one output token do not fit the context, or the whole cache.
        InvalidParameterError: max_new_tokens beyond those, a listed token outside the vocabulary, no seed.
    """
    spec = command.spec
    prompt_length = command.prompt_length
    if not 1 <= prompt_length <= len(committed_token_ids):
        raise MalformedRequestError("the committed tokens do not begin with a prompt", field="prompt_length")
    most_positions = min(limits.context_limit, limits.cache_limit)
    place = "context" if limits.context_limit == most_positions else "key-value cache"
    room = most_positions - prompt_length
    if room < 1:
        raise PromptTooLongError(
            f"the prompt has {prompt_length} tokens; the {place} takes {most_positions}",
            num_prompt_tokens=str(prompt_length),
            context_limit=str(most_positions),
        )
    for field, token_ids in (
        ("committed_token_ids", committed_token_ids[prompt_length:]),
        ("recorded_token_ids", command.recorded_token_ids),
    ):
        if len(token_ids) > limits.context_limit:  # before they are looked at one by one
            raise MalformedRequestError(f"{field}: more tokens than the context takes", field=field)
    told = itertools.chain(committed_token_ids, command.recorded_token_ids)
    if any(not 0 <= token_id < limits.num_real_tokens for token_id in told):
        raise TokenOutOfVocabularyError(f"token ids must be in [0, {limits.num_real_tokens})")
    spec.sampling.validated(limits.num_real_tokens)
    require_possible_token(spec.sampling, _end_token_ids(spec, limits), limits.num_real_tokens)
    if any(not 0 <= token_id < limits.vocabulary_size for token_id in spec.stop.stop_token_ids):
        raise InvalidParameterError("stop_token_ids: token id outside the vocabulary", field="stop_token_ids")
    if spec.sampling.seed is None and spec.sampling.rule is not AcceptanceRule.GREEDY:
        raise InvalidParameterError("seed: required by the verifier when sampling", field="seed")
    wanted = spec.stop.max_new_tokens
    if wanted is not None and wanted > room:
        raise InvalidParameterError(
            f"max_new_tokens: {wanted} asked for, the {place} leaves room for {room}", field="max_new_tokens"
        )
    return min(room, default_max_new_tokens) if wanted is None else wanted

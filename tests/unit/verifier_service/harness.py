"""An engine over a made-up target: logits are a hash of the token prefix. No threads, no sockets, own clock."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence

import torch

from specdec import PROTOCOL_VERSION
from specdec.attach_key import attach_key
from specdec.errors import SpecdecError
from specdec.ids import AttachmentId, DraftSequence, Epoch, SessionId, digest_tokens
from specdec.messages import (
    Addressed,
    Attach,
    Commit,
    Detached,
    Draft,
    Numerics,
    Opened,
    OpenSession,
    SessionEvent,
    SessionFinished,
    VerifierMessage,
)
from specdec.model.block_pool import BlockPool
from specdec.model.interface import Runner
from specdec.model.kv_cache import CacheLayout, KVCache, KVStorage
from specdec.model.runner import Rows
from specdec.params import GenerationSpec, SamplingParams, SpeculationOptions, StopCriteria
from verifier_service.admission import EngineLimits
from verifier_service.attachment import DrafterStream
from verifier_service.engine import Engine
from verifier_service.scheduler import SchedulerPolicy

VOCABULARY_SIZE = 24
NUM_REAL_TOKENS = VOCABULARY_SIZE - 2
"""The last two rows are padding."""
END_TOKEN_ID = 0
NONCE = b"n" * 16


class HashRunner:
    """A target whose logits depend on the token prefix alone, and on every token of it.

    It has the paged cache of real models, with a token's id in each slot instead of its keys and values, and reads the
    prefix from there: a wrong block gives wrong logits.
    """

    vocabulary_size = VOCABULARY_SIZE
    numerics = Numerics("fingerprint", "weights", "float32", "float32", "cpu", "hash", "hash", "none")
    device = torch.device("cpu")

    def __init__(self, num_blocks: int = 256, context_limit: int = 128, max_rows: int = 4096) -> None:
        self.context_limit = context_limit
        self.max_rows = max_rows
        self.pool = BlockPool(num_blocks)
        layout = CacheLayout(1, 1, 1, torch.int64, self.device, context_limit)
        self.kv_bytes_per_token = layout.bytes_per_token
        self.kv_budget_bytes = num_blocks * layout.bytes_per_block
        self._storage = KVStorage(layout, num_blocks)
        self._slots = self._storage.keys[0].view(-1).numpy()
        self._slots[:] = -1
        self.num_forwards = 0
        self.num_rows: list[int] = []
        self.caches: list[KVCache] = []
        self.fails = False
        self.fatal_token_id: int | None = None
        """A forward that is to compute this token fails."""
        self.on_forward: Callable[[int], None] = lambda num_rows: None

    def new_cache(self, salt: bytes = b"") -> KVCache:
        self.caches.append(KVCache(self.pool, self._storage, salt))
        return self.caches[-1]

    def forward_rows(self, batch: Sequence[Rows]) -> torch.Tensor:
        self.num_forwards += 1
        self.num_rows.append(sum(len(rows.token_ids) for rows in batch))
        self.on_forward(self.num_rows[-1])
        if self.fails or any(self.fatal_token_id in rows.token_ids for rows in batch):
            raise RuntimeError("out of memory")
        if self.num_rows[-1] > self.max_rows or len({id(rows.cache) for rows in batch}) != len(batch):
            raise ValueError("not a batch")
        return torch.cat([self._session(rows) for rows in batch])

    def _session(self, rows: Rows) -> torch.Tensor:
        cache, num_rows = rows.cache, len(rows.token_ids)
        before = self._slots[cache.slot_places(0, cache.length)].tolist()
        cache.reserve(cache.length + num_rows)
        self._slots[cache.slot_places(cache.length, cache.length + num_rows)] = rows.token_ids
        cache.extend(num_rows)
        parents = rows.parent_rows if rows.parent_rows is not None else range(-1, num_rows - 1)
        prefixes: list[list[int]] = []
        for token_id, parent in zip(rows.token_ids, parents, strict=True):
            prefixes.append([*(before if parent == -1 else prefixes[parent]), token_id])
        logits = [prefix_logits(prefix) for prefix in prefixes[rows.logits_from :]]
        return torch.stack(logits) if logits else torch.empty(0, VOCABULARY_SIZE)


def prefix_logits(prefix: Sequence[int]) -> torch.Tensor:
    return _prefix_logits(tuple(prefix))


@functools.lru_cache(maxsize=4096)
def _prefix_logits(prefix: tuple[int, ...]) -> torch.Tensor:
    seed = int.from_bytes(hashlib.sha256(repr(list(prefix)).encode()).digest()[:7], "big")
    logits = 2 * torch.randn(VOCABULARY_SIZE, generator=torch.Generator().manual_seed(seed))
    logits[END_TOKEN_ID] -= 3
    logits[NUM_REAL_TOKENS:] += 9  # what a model says of padding must not matter
    return logits


class LetterTokenizer:
    """Token id 1 is "a", 2 is "b", and so on, from "a" again after the last letter; one id ends the output."""

    fingerprint = "letters"

    def __init__(self, vocabulary_size: int = NUM_REAL_TOKENS, end_token_id: int = END_TOKEN_ID) -> None:
        self.vocabulary_size = vocabulary_size
        self.end_token_ids = frozenset({end_token_id})
        letters = (bytes([ord("a") + (token_id - 1) % 26]) for token_id in range(vocabulary_size))
        self.pieces = tuple(b"" if token_id == end_token_id else piece for token_id, piece in enumerate(letters))


@dataclasses.dataclass
class CountingObserver:
    dropped: list[str] = dataclasses.field(default_factory=list)
    refused: list[str] = dataclasses.field(default_factory=list)
    num_preemptions: int = 0
    num_inconsistencies: int = 0
    num_used_blocks: int = 0
    num_blocks: int = 0

    def sessions(self, num_active: int, num_waiting: int) -> None: ...

    def round(self, statistics: object, num_committed_tokens: int) -> None: ...

    def finished(self, reason: object, usage: object) -> None: ...

    def speculating(self, num_sessions: int) -> None: ...

    def step(self, num_rows: int, forward_time_s: float, step_time_s: float) -> None: ...

    def blocks(self, num_used: int, num_blocks: int) -> None:
        self.num_used_blocks, self.num_blocks = num_used, num_blocks

    def preempted(self) -> None:
        self.num_preemptions += 1

    def cache_inconsistent(self) -> None:
        self.num_inconsistencies += 1

    def draft_dropped(self, reason: object) -> None:
        self.dropped.append(reason.value)

    def draft_refused(self, reason: object) -> None:
        self.refused.append(reason.value)


class Session:
    """One open session: its events, and the drafter that a test plays."""

    def __init__(self, bench: "Bench", session_id: str, epoch: int, nonce: bytes, spec: GenerationSpec) -> None:
        self.bench = bench
        self.session_id = SessionId(session_id)
        self.epoch = Epoch(epoch)
        self.nonce = nonce
        self.spec = spec
        self.events: list[SessionEvent | SpecdecError] = []
        self.sink = self.events.append  # kept: a session is closed by the very sink that it was opened with

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def opened(self) -> Opened:
        return self.of(Opened)[0]

    @property
    def token_ids(self) -> list[int]:
        return [token_id for commit in self.of(Commit) for token_id in commit.token_ids]

    @property
    def finished(self) -> SessionFinished | None:
        return next(iter(self.of(SessionFinished)), None)

    @property
    def text(self) -> str:
        return "".join(commit.text for commit in self.of(Commit)) + (self.finished.text if self.finished else "")


class Drafter:
    """A drafter that a test plays by hand. `answers` holds what each of its drafts was answered."""

    def __init__(self, bench: "Bench") -> None:
        self.bench = bench
        self.messages: list[VerifierMessage] = []
        self.stream = DrafterStream(lambda addressed: self.messages.append(addressed.message))
        self.next_sequence = 1

    def attach(self, session: Session, attachment_id: int = 1, **changes: object) -> None:
        attach = Attach(
            epoch=session.epoch,
            attach_key=attach_key(session.opened.attach_secret, AttachmentId(attachment_id)),
            known_length=0,
            known_digest=digest_tokens([]),
            tokenizer_fingerprint="",
            vocabulary_size=0,
            context_limit=0,
            protocol_version=PROTOCOL_VERSION,
        )
        self.send(session, attachment_id, dataclasses.replace(attach, **changes))

    def draft(
        self,
        session: Session,
        token_ids: Sequence[int],
        start_position: int | None = None,
        attachment_id: int = 1,
        arrived_at: float | None = None,
        **changes: object,
    ) -> int:
        sequence = self.next_sequence
        self.next_sequence += 1
        start = (
            len(session.opened.prompt_token_ids) + len(session.token_ids) if start_position is None else start_position
        )
        draft = Draft(session.epoch, DraftSequence(sequence), start, tuple(token_ids))
        self.send(session, attachment_id, dataclasses.replace(draft, **changes), arrived_at)
        return sequence

    def send(self, session: Session, attachment_id: int, message: object, arrived_at: float | None = None) -> None:
        addressed = Addressed(session.session_id, AttachmentId(attachment_id), message)
        self.bench.engine.drafters.receive(self.stream, addressed, arrived_at)

    def answers(self) -> dict[int, list[VerifierMessage]]:
        answers: dict[int, list[VerifierMessage]] = {}
        for message in self.messages:
            if hasattr(message, "draft_sequence"):
                answers.setdefault(message.draft_sequence, []).append(message)
        return answers

    @property
    def detached(self) -> list[str]:
        return [message.reason.value for message in self.messages if isinstance(message, Detached)]


class Bench:
    """An engine, its target and a clock that tests move."""

    def __init__(
        self,
        *,
        max_step_rows: int = 64,
        max_draft_tokens: int = 8,
        max_sessions: int = 16,
        max_waiting_sessions: int = 4,
        prefix_caching: bool = True,
        default_max_new_tokens: int = 1000,
        kept_tokens_grace_s: float = 30.0,
        max_attachments_per_stream: int = 1024,
        runner: Runner | None = None,
        tokenizer: LetterTokenizer | None = None,
    ) -> None:
        self.now = 0.0
        self.runner = runner or HashRunner()
        self.observer = CountingObserver()
        self.policy = SchedulerPolicy(max_step_rows, max_draft_tokens, draft_wait_s=1.0)
        self.engine = Engine(
            "target",
            self.runner,
            tokenizer or LetterTokenizer(),  # type: ignore[arg-type]
            self.policy,
            EngineLimits(
                max_sessions,
                max_waiting_sessions,
                default_max_new_tokens,
                prefix_caching,
                kept_tokens_grace_s,
                max_attachments_per_stream,
            ),
            self.observer,
            lambda: self.now,
        )

    def open(
        self,
        prompt: Sequence[int] = (5, 6, 7),
        *,
        session_id: str = "s",
        epoch: int = 1,
        nonce: bytes = NONCE,
        committed: Sequence[int] = (),
        sampling: SamplingParams | None = None,
        stop: StopCriteria | None = None,
        speculation: SpeculationOptions | None = None,
        model: str = "",
        tenant: str = "",
        sample_index: int = 0,
        num_logprobs: int | None = None,
        num_prompt_logprobs: int | None = None,
        recorded: Sequence[int] = (),
        recorded_epoch: int = 0,
        knows_prompt: bool = True,
    ) -> Session:
        spec = GenerationSpec(
            tuple(prompt),
            model=model,
            sampling=sampling or SamplingParams(temperature=0.0),
            stop=stop or StopCriteria(max_new_tokens=12),
            speculation=speculation or SpeculationOptions(),
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
        )
        session = Session(self, session_id, epoch, nonce, spec)
        command = OpenSession(
            session.session_id,
            session.epoch,
            nonce,
            spec,
            committed,
            len(prompt) if committed and knows_prompt else 0,
            tenant,
            sample_index,
            recorded,
            Epoch(recorded_epoch),
        )
        self.engine.open_session(command, prompt, session.sink)
        return session

    def close(self, session: Session) -> None:
        self.engine.close_session(session.session_id, session.sink)

    def run(self, *sessions: Session, max_steps: int = 500) -> None:
        """Steps until every session has finished. Time moves only where the engine waits for it."""
        for _ in range(max_steps):
            if all(session.finished for session in sessions):
                return
            wake_at = self.engine.step()
            if wake_at is not None and wake_at > self.now:
                self.now = wake_at
        raise TimeoutError("the sessions did not finish")

    def step(self) -> float | None:
        return self.engine.step()


def greedy_token_ids(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the target alone gives, without an engine."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(prefix_logits(token_ids)[:NUM_REAL_TOKENS].argmax()))
        if token_ids[-1] == END_TOKEN_ID:
            break
    return token_ids[len(prompt) :]

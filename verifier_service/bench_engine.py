"""An engine without a wire, for measuring: sessions that are opened, stepped and drafted for in one process.

Drafts are the target's own tokens, told in advance, so that all are accepted and the engine goes on asking for them.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence

from specdec import PROTOCOL_VERSION
from specdec.attach_key import attach_key
from specdec.errors import SpecdecError
from specdec.ids import AttachmentId, DraftSequence, Epoch, SessionId, digest_tokens
from specdec.messages import (
    Addressed,
    Advance,
    Attach,
    Attached,
    BudgetUpdate,
    Commit,
    Draft,
    Dropped,
    DropReason,
    Opened,
    OpenSession,
    RefusalReason,
    RoundStatistics,
    SessionEvent,
    SessionFinished,
    Usage,
    Verdict,
)
from specdec.model.loading import LoadedModel
from specdec.params import FinishReason, GenerationSpec, SamplingParams, StopCriteria
from verifier_service.admission import EngineLimits
from verifier_service.attachment import DrafterStream
from verifier_service.engine import Engine
from verifier_service.scheduler import SchedulerPolicy

_EPOCH = Epoch(1)
_ATTACHMENT = AttachmentId(1)
_NONCE = b"bench-engine"


@dataclasses.dataclass(frozen=True)
class Step:
    """One step that ran a forward."""

    num_rows: int
    forward_time_s: float
    step_time_s: float


class StepObserver:
    """Notes the steps; the rest of what an engine tells is not of interest here."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def step(self, num_rows: int, forward_time_s: float, step_time_s: float) -> None:
        self.steps.append(Step(num_rows, forward_time_s, step_time_s))

    def sessions(self, num_active: int, num_waiting: int) -> None: ...
    def speculating(self, num_sessions: int) -> None: ...
    def blocks(self, num_used: int, num_blocks: int) -> None: ...
    def preempted(self) -> None: ...
    def cache_inconsistent(self) -> None: ...
    def round(self, statistics: RoundStatistics, num_committed_tokens: int) -> None: ...
    def finished(self, reason: FinishReason, usage: Usage) -> None: ...
    def draft_dropped(self, reason: DropReason) -> None: ...
    def draft_refused(self, reason: RefusalReason) -> None: ...


class BenchSession:
    """One open session. `told` is what a drafter knows of its output in advance."""

    def __init__(self, session_id: SessionId, prompt: Sequence[int], told: Sequence[int], draft_tokens: int) -> None:
        self.session_id = session_id
        self.prompt = prompt
        self.events: list[SessionEvent | SpecdecError] = []
        self.attach_secret = b""
        self.sink = self._take  # kept: a session is closed by the very sink that it was opened with
        self._told = told
        self._draft_tokens = draft_tokens
        self._next_sequence = 1

    def _take(self, event: SessionEvent | SpecdecError) -> None:
        self.events.append(event)
        if isinstance(event, SpecdecError):
            raise event
        if isinstance(event, Opened):
            self.attach_secret = event.attach_secret

    @property
    def token_ids(self) -> list[int]:
        return [token_id for event in self.events if isinstance(event, Commit) for token_id in event.token_ids]

    @property
    def has_finished(self) -> bool:
        return any(isinstance(event, SessionFinished) for event in self.events)

    def next_draft(self, committed_length: int, budget: int) -> Draft:
        num_known = committed_length - len(self.prompt)
        token_ids = self._told[num_known : num_known + min(self._draft_tokens, budget)]
        draft = Draft(_EPOCH, DraftSequence(self._next_sequence), committed_length, tuple(token_ids))
        self._next_sequence += 1
        return draft


class BenchEngine:
    """An engine over a loaded model, and the drafter of those sessions that have one."""

    def __init__(self, model: LoadedModel, max_step_rows: int, *, prefix_caching: bool = False) -> None:
        self.observer = StepObserver()
        policy = SchedulerPolicy(
            min(max_step_rows, model.runner.max_rows), max_draft_tokens=32, draft_wait_s=2.0, judges_drafts=False
        )
        limits = EngineLimits(
            max_sessions=256,
            max_waiting_sessions=256,
            default_max_new_tokens=1024,
            prefix_caching=prefix_caching,
        )
        self._engine = Engine(
            model.info.name, model.runner, model.tokenizer, policy, limits, self.observer, time.monotonic
        )
        self._stream = DrafterStream(self._answered)
        self._answers: list[Addressed] = []
        self._sessions: dict[SessionId, BenchSession] = {}
        self._num_opened = 0

    @property
    def sessions(self) -> Mapping[SessionId, BenchSession]:
        return self._sessions

    @property
    def kv_used_bytes(self) -> int:
        return self._engine.load().kv_used_bytes

    def open(
        self, prompt: Sequence[int], max_new_tokens: int, *, told: Sequence[int] = (), draft_tokens: int = 0
    ) -> BenchSession:
        """A greedy session over these tokens, that nothing ends before `max_new_tokens`."""
        self._num_opened += 1
        session = BenchSession(SessionId(f"bench-{self._num_opened}"), prompt, told, draft_tokens)
        self._sessions[session.session_id] = session
        spec = GenerationSpec(
            tuple(prompt),
            sampling=SamplingParams(temperature=0.0),
            stop=StopCriteria(max_new_tokens=max_new_tokens, ignore_end_of_sequence=True),
        )
        command = OpenSession(session.session_id, _EPOCH, _NONCE, spec, (), 0)
        self._engine.open_session(command, prompt, session.sink)
        if draft_tokens:
            self._attach(session)
        return session

    def step(self) -> bool:
        """Answers what drafters were told, then runs a step; whether there is more to do."""
        answers, self._answers = self._answers, []
        for addressed in answers:
            self._draft(addressed)
        return self._engine.step() is not None

    def close(self) -> None:
        """Ends all sessions and checks that no block is left behind."""
        for session in self._sessions.values():
            self._engine.close_session(session.session_id, session.sink)
        self._sessions.clear()
        self._answers.clear()
        self._engine.check_cache()

    def _attach(self, session: BenchSession) -> None:
        attach = Attach(
            epoch=_EPOCH,
            attach_key=attach_key(session.attach_secret, _ATTACHMENT),
            known_length=0,
            known_digest=digest_tokens([]),
            tokenizer_fingerprint="",
            vocabulary_size=0,
            context_limit=0,
            protocol_version=PROTOCOL_VERSION,
        )
        self._engine.drafters.receive(self._stream, Addressed(session.session_id, _ATTACHMENT, attach))

    def _answered(self, addressed: Addressed) -> None:
        self._answers.append(addressed)

    def _draft(self, addressed: Addressed) -> None:
        session = self._sessions[addressed.session_id]
        match addressed.message:
            case Attached(draft_budget=budget):
                draft = session.next_draft(len(session.prompt), budget)
            case Verdict(finish_reason=None) | Advance(finish_reason=None) | Dropped() as told:
                draft = session.next_draft(told.committed_length, told.draft_budget)
            case BudgetUpdate(draft_budget=budget):
                draft = session.next_draft(len(session.prompt) + len(session.token_ids), budget)
            case _:
                return
        self._engine.drafters.receive(self._stream, Addressed(session.session_id, _ATTACHMENT, draft))

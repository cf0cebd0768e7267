"""One valid example of everything that roles say to one another, with the fields of version 0.1 alone.

Built by name and without the fields that came later, so that the same lines make them in either version.
"""

from collections.abc import Callable
from typing import Any

from specdec.ids import AttachmentId, DraftSequence, Epoch, Round, SessionId
from specdec.messages import (
    Addressed,
    Advance,
    Attach,
    Attached,
    AttachmentChange,
    AttachmentState,
    AttachRefusal,
    AttachRefused,
    AttachSession,
    BudgetUpdate,
    Commit,
    Delta,
    Detach,
    Detached,
    DetachReason,
    Draft,
    Draining,
    Dropped,
    DropReason,
    Fenced,
    Finished,
    Load,
    ModelInfo,
    Numerics,
    Opened,
    OpenSession,
    PositionLogprobs,
    PromptLogprobs,
    RefusalReason,
    Refused,
    RoundStatistics,
    SelfCheck,
    ServerStatus,
    SessionFinished,
    SparseDistribution,
    SpeculativeStatistics,
    Started,
    TokenLogprob,
    Usage,
    Verdict,
)
from specdec.params import (
    AcceptanceRule,
    ChatMessage,
    FinishReason,
    GenerationSpec,
    NextTokenKind,
    SamplingParams,
    SpeculationOptions,
    StopCriteria,
)
from specdec.v1 import common_pb2, drafter_pb2, generation_pb2, verifier_pb2
from specdec.wire import convert

SESSION, ATTACHMENT, EPOCH, ROUND = SessionId("session-1.2"), AttachmentId(3), Epoch(4), Round(5)
NUMERICS = Numerics("fingerprint", "digest", "bfloat16", "float32", "cpu", "lanes", "paged", "torch 2")
SPEC = GenerationSpec(
    prompt=(ChatMessage("user", "Grüße"),),
    model="target",
    sampling=SamplingParams(
        temperature=0.75,
        top_k=40,
        top_p=0.875,
        min_p=0.125,
        repetition_penalty=1.25,
        presence_penalty=-0.5,
        frequency_penalty=0.5,
        logit_bias={7: -2.5},
        allowed_token_ids=(1, 2, 7),
        banned_token_ids=(9,),
        min_tokens=2,
        seed=2**62,
        acceptance_rule=AcceptanceRule.COUPLED,
    ),
    stop=StopCriteria(max_new_tokens=64, stop_strings=("\n\n",), stop_token_ids=(0,), ignore_end_of_sequence=True),
    speculation=SpeculationOptions(max_draft_tokens=0, max_draft_wait_s=0.25),
    num_logprobs=0,
    num_samples=2,
    num_prompt_logprobs=3,
)
ROUND_STATISTICS = RoundStatistics(8, 5, NextTokenKind.RECOVERED, 0.5, 0.25, 0.125, 0.0625, 0.03125, True)
SPECULATIVE = SpeculativeStatistics(9, 40, 20, (9, 8, 3), (9, 9, 9), 12, 2, 1, 3, "LOAD")
LOGPROBS = (PositionLogprobs(TokenLogprob(7, -0.5), (TokenLogprob(8, -1.5),)),)

_ADDRESSED = {
    "Attach": Attach(EPOCH, b"k" * 32, 6, b"d" * 32, "tokenizer", 32_000, 2048, 1, wants_hidden_states=True),
    "Draft": Draft(
        EPOCH,
        DraftSequence(7),
        12,
        (1, 2),
        (-1, 0),
        (SparseDistribution((1,), (1.0,)), SparseDistribution((), ())),
        0.5,
    ),
    "Detach": Detach(),
    "Attached": Attached((5, 6), 4, 2**40, 8),
    "AttachRefused": AttachRefused(AttachRefusal.TOO_MANY_ATTACHMENTS, "too many"),
    "Verdict": Verdict(DraftSequence(7), ROUND, 12, 1, (1, 9), 14, 8, (0,), FinishReason.STOP_STRING),
    "Advance": Advance(ROUND, 12, (3,), 13, 8, FinishReason.LENGTH),
    "Dropped": Dropped(DraftSequence(7), DropReason.SESSION_ENDED, 14, (9,), 0),
    "Refused": Refused(DraftSequence(7), RefusalReason.NOT_ALLOWED_BY_RULE, "no", 14, (9,), 8),
    "BudgetUpdate": BudgetUpdate(0),
    "Detached": Detached(DetachReason.DRAINING),
}
_SESSION_EVENTS = {
    "Opened": Opened(b"s" * 32, (1, 2), AcceptanceRule.ONE_HOT, NUMERICS, "target", 64, (3, 4), Epoch(2)),
    "Commit": Commit(ROUND, 12, (1, 9), "ab", ROUND_STATISTICS, 13, ("a", "b"), LOGPROBS * 2),
    "Draining": Draining(2.5),
    "SessionFinished": SessionFinished(FinishReason.STOP_TOKEN, Usage(2, 3, 1), SPECULATIVE, "rest"),
    "Fenced": Fenced(Epoch(9)),
    "AttachmentChange": AttachmentChange(ATTACHMENT, AttachmentState.DETACHED, None, DetachReason.SLOW_READER),
    "PromptLogprobs": PromptLogprobs(1, LOGPROBS),
}
_GENERATION_EVENTS = {
    "Started": Started(SESSION, "target", 5, AcceptanceRule.REJECTION, 2, "fingerprint", (SESSION,)),
    "Delta": Delta("ab", (1, 9), 12, ROUND_STATISTICS, ("a", "b"), LOGPROBS * 2, 1),
    "Finished": Finished(FinishReason.CANCELLED, Usage(2, 3, 1), SPECULATIVE, "rest", 1),
}

EXAMPLES: dict[str, Any] = {
    "OpenSession": OpenSession(SESSION, EPOCH, b"n" * 16, SPEC, (1, 2, 3), 2, "tenant", 2),
    "AttachSession": AttachSession(
        SESSION,
        EPOCH,
        "127.0.0.1:5000",
        ATTACHMENT,
        b"k" * 32,
        SamplingParams(temperature=0.5),
        SpeculationOptions(disabled=True),
        (1, 2, 3),
        2,
        AcceptanceRule.COUPLED,
        1,
    ),
    "GenerationSpec": SPEC,
    "ServerStatus": ServerStatus(
        True,
        True,
        "0.1.0",
        1,
        ModelInfo("target", 32_000, 4096, "tokenizer", NUMERICS),
        SelfCheck(True, 512, (2, 8), 300, "ok", 1.5),
        Load(1, 2, 3, 4, 5),
        "ngram",
    ),
    **_SESSION_EVENTS,
    **_GENERATION_EVENTS,
    **{name: Addressed(SESSION, ATTACHMENT, message) for name, message in _ADDRESSED.items()},
}

Converter = Callable[[Any], Any]


def wire_form(name: str) -> tuple[type[Any], Converter, Converter]:
    """An example's protobuf class, and how it gets there and back."""
    if name in _SESSION_EVENTS:
        return verifier_pb2.SessionEvent, convert.session_event_to_pb, convert.session_event_from_pb
    if name in _GENERATION_EVENTS:
        return generation_pb2.GenerationEvent, convert.generation_event_to_pb, convert.generation_event_from_pb
    if name in ("Attach", "Draft", "Detach"):
        return verifier_pb2.VerifyRequest, convert.verify_request_to_pb, convert.verify_request_from_pb
    if name in _ADDRESSED:
        return verifier_pb2.VerifyResponse, convert.verify_response_to_pb, convert.verify_response_from_pb
    return {
        "OpenSession": (verifier_pb2.OpenSessionRequest, convert.open_session_to_pb, convert.open_session_from_pb),
        "AttachSession": (
            drafter_pb2.AttachSessionRequest,
            convert.attach_session_to_pb,
            convert.attach_session_from_pb,
        ),
        "GenerationSpec": (common_pb2.GenerationSpec, convert.generation_spec_to_pb, convert.generation_spec_from_pb),
        "ServerStatus": (common_pb2.ServerStatus, convert.server_status_to_pb, convert.server_status_from_pb),
    }[name]

"""What is sent is what arrives, and what makes no sense is refused by the error tree and by nothing else."""

import contextlib
import dataclasses
import inspect
import math
import typing
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import messages
from specdec.errors import EmptyPromptError, InvalidParameterError, MalformedRequestError, SpecdecError
from specdec.ids import AttachmentId, SessionId
from specdec.messages import (
    Addressed,
    AttachSession,
    Detach,
    Detached,
    DetachReason,
    Draft,
    OpenSession,
    ServerStatus,
)
from specdec.messages.cluster import ClusterStatus, SessionSummary
from specdec.params import MAX_DRAFT_NODES, AcceptanceRule, GenerationSpec, SamplingParams, StopCriteria
from specdec.v1 import admin_pb2, common_pb2, drafter_pb2, generation_pb2, verifier_pb2
from specdec.wire import convert
from specdec.wire.convert import cluster
from specdec.wire.convert.enums import ACCEPTANCE_RULE, EnumCodec
from specdec.wire.convert.sessions import MAX_SESSION_TOKENS
from tests.unit.wire.strategies import GENERATION_SPECS, instances
from tests.unit.wire.strategies import messages as any_message

BOUNDED = settings(max_examples=30, deadline=None)

Converter = Callable[[Any], Any]
PAIRS: dict[type[Any], tuple[Converter, Converter]] = {
    OpenSession: (convert.open_session_to_pb, convert.open_session_from_pb),
    AttachSession: (convert.attach_session_to_pb, convert.attach_session_from_pb),
    ServerStatus: (convert.server_status_to_pb, convert.server_status_from_pb),
    GenerationSpec: (convert.generation_spec_to_pb, convert.generation_spec_from_pb),
    ClusterStatus: (cluster.cluster_status_to_pb, cluster.cluster_status_from_pb),
    SessionSummary: (cluster.session_summary_to_pb, cluster.session_summary_from_pb),
}
PAIRS |= dict.fromkeys(
    typing.get_args(messages.SessionEvent), (convert.session_event_to_pb, convert.session_event_from_pb)
)
PAIRS |= dict.fromkeys(
    typing.get_args(messages.GenerationEvent), (convert.generation_event_to_pb, convert.generation_event_from_pb)
)
DRAFTER_MESSAGES = typing.get_args(messages.DrafterMessage)
VERIFIER_MESSAGES = typing.get_args(messages.VerifierMessage)

READERS: dict[type[Message], Converter] = {
    generation_pb2.GenerateRequest: lambda request: convert.generation_spec_from_pb(request.spec),
    generation_pb2.ResumeRequest: lambda request: convert.generation_spec_from_pb(request.spec),
    generation_pb2.GenerationEvent: convert.generation_event_from_pb,
    verifier_pb2.OpenSessionRequest: convert.open_session_from_pb,
    verifier_pb2.SessionEvent: convert.session_event_from_pb,
    verifier_pb2.VerifyRequest: convert.verify_request_from_pb,
    verifier_pb2.VerifyResponse: convert.verify_response_from_pb,
    drafter_pb2.AttachSessionRequest: convert.attach_session_from_pb,
    common_pb2.ServerStatus: convert.server_status_from_pb,
    admin_pb2.ClusterStatus: cluster.cluster_status_from_pb,
    admin_pb2.SessionSummary: cluster.session_summary_from_pb,
}


def over_the_wire(message: Message) -> Message:
    return type(message).FromString(message.SerializeToString())


@pytest.mark.parametrize("cls", PAIRS, ids=lambda cls: cls.__name__)
@given(data=st.data())
@BOUNDED
def test_what_is_sent_is_what_arrives(cls: type[Any], data: st.DataObject) -> None:
    sent = data.draw(instances(cls))
    to_pb, from_pb = PAIRS[cls]
    assert from_pb(over_the_wire(to_pb(sent))) == sent


@pytest.mark.parametrize("cls", [*DRAFTER_MESSAGES, *VERIFIER_MESSAGES], ids=lambda cls: cls.__name__)
@given(data=st.data())
@BOUNDED
def test_what_is_said_on_the_verify_stream_is_what_arrives(cls: type[Any], data: st.DataObject) -> None:
    sent = Addressed(SessionId("session-1"), AttachmentId(3), data.draw(instances(cls)))
    if cls in DRAFTER_MESSAGES:
        arrived = convert.verify_request_from_pb(over_the_wire(convert.verify_request_to_pb(sent)))
    else:
        arrived = convert.verify_response_from_pb(over_the_wire(convert.verify_response_to_pb(sent)))
    assert arrived == sent


def test_every_dataclass_of_the_messages_is_sent_by_one_of_these_tests() -> None:
    reached: set[type[Any]] = set()

    def reach(hint: Any) -> None:
        for part in typing.get_args(hint):
            reach(part)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type) and hint not in reached:
            reached.add(hint)
            for field_hint in typing.get_type_hints(hint).values():
                reach(field_hint)

    for root in (*PAIRS, Addressed):
        reach(root)
    defined = {cls for _, cls in inspect.getmembers(messages, dataclasses.is_dataclass)}
    assert defined <= reached


@pytest.mark.parametrize("cls", READERS, ids=lambda cls: cls.__name__)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_message_is_read_or_refused_by_the_error_tree(cls: type[Message], data: st.DataObject) -> None:
    with contextlib.suppress(SpecdecError):
        READERS[cls](data.draw(any_message(cls)))


@pytest.mark.parametrize("cls", READERS, ids=lambda cls: cls.__name__)
@given(serialized=st.binary(max_size=200))
@BOUNDED
def test_random_bytes_are_read_or_refused_by_the_error_tree(cls: type[Message], serialized: bytes) -> None:
    with contextlib.suppress(SpecdecError, DecodeError):
        READERS[cls](cls.FromString(serialized))


@given(spec=GENERATION_SPECS)
@BOUNDED
def test_a_spec_that_arrived_is_valid_or_refused_exactly_as_the_one_that_was_sent(spec: GenerationSpec) -> None:
    def verdict(checked: GenerationSpec) -> str:
        try:
            checked.validated()
        except SpecdecError as error:
            return error.message
        return "valid"

    assert verdict(convert.generation_spec_from_pb(convert.generation_spec_to_pb(spec))) == verdict(spec)


def test_absent_fields_are_the_defaults_of_the_dataclasses() -> None:
    assert convert.sampling_from_pb(common_pb2.SamplingParameters()) == SamplingParams()
    assert convert.stop_from_pb(common_pb2.StopCriteria()) == StopCriteria()
    empty_text = common_pb2.GenerationSpec(text="x")
    assert convert.generation_spec_from_pb(empty_text) == GenerationSpec(prompt="x")


def test_a_request_without_a_prompt_is_told_so() -> None:
    with pytest.raises(EmptyPromptError):
        convert.generation_spec_from_pb(common_pb2.GenerationSpec())


def test_an_explicit_zero_is_not_a_default() -> None:
    message = common_pb2.SamplingParameters(temperature=0.0, top_p=0.0, repetition_penalty=0.0, seed=0)
    sampling = convert.sampling_from_pb(message)
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty, sampling.seed) == (0.0, 0.0, 0.0, 0)
    spec = common_pb2.GenerationSpec(text="x", num_samples=0)
    with pytest.raises(InvalidParameterError, match="num_samples"):
        convert.generation_spec_from_pb(spec).validated()


def test_a_value_that_is_no_number_is_refused_by_validation_and_names_its_field() -> None:
    sampling = convert.sampling_from_pb(common_pb2.SamplingParameters(temperature=math.nan))
    with pytest.raises(InvalidParameterError) as raised:
        sampling.validated()
    assert raised.value.metadata == {"field": "temperature"}


def test_an_enum_value_of_a_later_version_is_malformed_not_a_default() -> None:
    message = common_pb2.SamplingParameters(acceptance_rule=99)
    with pytest.raises(MalformedRequestError):
        convert.sampling_from_pb(message)


@pytest.mark.parametrize(("seconds", "nanos"), [(-1, 0), (0, -1), (2**62, 0), (0, 10**9)])
def test_a_duration_out_of_range_is_refused_in_a_request(seconds: int, nanos: int) -> None:
    message = common_pb2.SpeculationOptions()
    message.max_draft_wait.seconds, message.max_draft_wait.nanos = seconds, nanos
    with pytest.raises(InvalidParameterError, match="max_draft_wait"):
        convert.speculation_from_pb(message)


@pytest.mark.parametrize("seconds", [-0.5, math.nan, math.inf, 1e300])
def test_a_duration_that_is_none_is_not_sent(seconds: float) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        convert.duration_to_pb(seconds)


def test_lists_longer_than_their_limit_are_refused_before_they_are_copied() -> None:
    with pytest.raises(InvalidParameterError, match="banned_token_ids"):
        convert.sampling_from_pb(common_pb2.SamplingParameters(banned_token_ids=range(1025)))
    with pytest.raises(InvalidParameterError, match="stop_strings"):
        convert.stop_from_pb(common_pb2.StopCriteria(stop_strings=["x"] * 17))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epoch", 0),
        ("owner_nonce", b"short"),
        ("owner_nonce", b"x" * 65),
        ("session_id", "a b"),
        ("session_id", "a.b"),
        ("prompt_length", 3),
        ("tenant", "a b"),
        ("sample_index", -1),
        ("sample_index", 16),
    ],
)
def test_an_owner_s_request_is_checked_field_by_field(field: str, value: Any) -> None:
    good = {"session_id": "s", "epoch": 1, "owner_nonce": b"x" * 16, "committed_token_ids": [1, 2], "prompt_length": 1}
    spec = common_pb2.GenerationSpec(text="x")
    convert.open_session_from_pb(verifier_pb2.OpenSessionRequest(spec=spec, **good))
    with pytest.raises(SpecdecError) as raised:
        convert.open_session_from_pb(verifier_pb2.OpenSessionRequest(spec=spec, **(good | {field: value})))
    assert raised.value.metadata == {"field": field}


@pytest.mark.parametrize("recorded_epoch", [0, 6, -1])
def test_recorded_tokens_come_with_the_epoch_of_an_earlier_owner(recorded_epoch: int) -> None:
    request = verifier_pb2.OpenSessionRequest(session_id="s", epoch=5, owner_nonce=b"x" * 16)
    request.spec.text = "x"
    request.recorded_token_ids.append(1)
    request.recorded_epoch = recorded_epoch
    with pytest.raises(MalformedRequestError) as raised:
        convert.open_session_from_pb(request)
    assert raised.value.metadata == {"field": "recorded_epoch"}


@pytest.mark.parametrize("field", ["committed_token_ids", "recorded_token_ids"])
def test_more_tokens_than_any_context_takes_are_refused_before_they_are_copied(field: str) -> None:
    request = verifier_pb2.OpenSessionRequest(session_id="s", epoch=5, owner_nonce=b"x" * 16)
    getattr(request, field).extend([0] * (MAX_SESSION_TOKENS + 1))
    with pytest.raises(MalformedRequestError) as raised:
        convert.open_session_from_pb(request)
    assert raised.value.metadata == {"field": field}


def test_what_one_draft_gets_wrong_does_not_break_the_stream_of_the_others() -> None:
    request = verifier_pb2.VerifyRequest(session_id="s", attachment_id=-4)
    request.draft.draft_token_ids.extend([-1, 2**31 - 1])
    request.draft.start_position = -7
    request.draft.draft_time.seconds = -3
    request.draft.draft_probs.add(token_ids=[1], probs=[math.nan, 2.0])
    arrived = convert.verify_request_from_pb(request).message
    assert isinstance(arrived, Draft)
    assert arrived.start_position == -7
    assert arrived.draft_time_s == 0.0


def test_a_message_of_the_other_direction_is_not_sent() -> None:
    with pytest.raises(TypeError, match="from drafter to verifier"):
        convert.verify_request_to_pb(Addressed(SessionId("s"), AttachmentId(1), Detached(DetachReason.REQUESTED)))
    with pytest.raises(TypeError, match="from verifier to drafter"):
        convert.verify_response_to_pb(Addressed(SessionId("s"), AttachmentId(1), Detach()))


def test_enums_are_mapped_by_name_and_an_enum_that_differs_from_its_proto_is_found_at_import() -> None:
    assert ACCEPTANCE_RULE.to_pb(AcceptanceRule.ONE_HOT) == common_pb2.ACCEPTANCE_RULE_ONE_HOT
    assert ACCEPTANCE_RULE.to_pb(None) == common_pb2.ACCEPTANCE_RULE_UNSPECIFIED
    with pytest.raises(TypeError, match="different members"):
        EnumCodec(AcceptanceRule, _WithOneMore())


class _WithOneMore:
    """A proto enum that knows one value more than the Python enum."""

    DESCRIPTOR = common_pb2.AcceptanceRule.DESCRIPTOR
    Value = staticmethod(common_pb2.AcceptanceRule.Value)

    def values(self) -> list[int]:
        return [*common_pb2.AcceptanceRule.values(), 99]


def test_a_draft_far_beyond_the_limit_on_nodes_is_read_no_further_than_it_takes_to_refuse_it() -> None:
    draft = verifier_pb2.Draft(draft_sequence=1, draft_token_ids=[1] * 5000)
    draft.draft_probs.extend([verifier_pb2.SparseDistribution()] * 5000)
    request = verifier_pb2.VerifyRequest(session_id="s", attachment_id=1, draft=draft)
    message = convert.verify_request_from_pb(request).message
    assert isinstance(message, messages.Draft)
    assert len(message.draft_token_ids) == len(message.draft_probs) == MAX_DRAFT_NODES + 1

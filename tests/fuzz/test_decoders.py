"""Whatever bytes come from outside, a decoder makes something sound of them or raises an error with a reason."""

import contextlib
import random
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import pydantic
import pytest
from google.protobuf.message import DecodeError, Message
from google.rpc import status_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.hostile.messages import hostile_bytes, hostile_message, with_hostile_fields
from bench.hostile.sound import sound_messages
from orchestrator.record import decode_record, decode_tokens
from specdec.config import DrafterSettings, OrchestratorSettings, VerifierSettings, parse_endpoint
from specdec.errors import ModelLoadError, SpecdecError
from specdec.model.synthetic_options import PREFIX, parse_synthetic
from specdec.v1 import admin_pb2, common_pb2, drafter_pb2, generation_pb2, verifier_pb2
from specdec.wire.convert import (
    attach_session_from_pb,
    generation_event_from_pb,
    generation_spec_from_pb,
    open_session_from_pb,
    server_status_from_pb,
    session_event_from_pb,
    verify_request_from_pb,
    verify_response_from_pb,
)
from specdec.wire.interceptors import error_from_rpc
from specdec.wire.tenant import TENANT_KEY, tenant_from_metadata

NUM_EXAMPLES = 400
fuzzed = settings(
    max_examples=NUM_EXAMPLES, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

DECODERS: Mapping[type[Message], Callable[[Any], Any]] = {
    common_pb2.GenerationSpec: lambda message: generation_spec_from_pb(message).validated(),
    verifier_pb2.OpenSessionRequest: lambda message: open_session_from_pb(message).spec.validated(),
    verifier_pb2.SessionEvent: session_event_from_pb,
    verifier_pb2.VerifyRequest: verify_request_from_pb,
    verifier_pb2.VerifyResponse: verify_response_from_pb,
    drafter_pb2.AttachSessionRequest: attach_session_from_pb,
    generation_pb2.GenerationEvent: generation_event_from_pb,
    common_pb2.ServerStatus: server_status_from_pb,
}


SOUND = {type(message): message for message in sound_messages()}


def _hostile(choice: random.Random, message_class: type[Message]) -> Message:
    """Anything at all, or what an honest peer would send but for one to three fields."""
    if choice.random() < 0.3:
        return hostile_message(choice, message_class)
    return with_hostile_fields(choice, SOUND[message_class], choice.randrange(1, 4))


def test_what_an_honest_peer_sends_is_read() -> None:
    for message_class, decode in DECODERS.items():
        decode(SOUND[message_class])


@pytest.mark.parametrize("message_class", DECODERS, ids=lambda message_class: message_class.DESCRIPTOR.name)
@fuzzed
@given(choice=st.randoms(use_true_random=False))
def test_a_message_is_read_or_refused_with_a_reason(message_class: type[Message], choice: random.Random) -> None:
    message = _hostile(choice, message_class)
    for serialized in (message.SerializeToString(), hostile_bytes(choice, message.SerializeToString())):
        with contextlib.suppress(DecodeError, SpecdecError):
            DECODERS[message_class](message_class.FromString(serialized))


def test_the_decoders_above_refuse_and_take_some_of_what_they_are_given() -> None:
    """Else the claim above would be one about nothing."""
    for message_class, decode in DECODERS.items():
        choice, num_taken, num_refused = random.Random(3), 0, 0
        for _ in range(3000):
            try:
                decode(_hostile(choice, message_class))
                num_taken += 1
            except SpecdecError:
                num_refused += 1
        assert min(num_taken, num_refused) > 0, message_class.DESCRIPTOR.name


@fuzzed
@given(choice=st.randoms(use_true_random=False))
def test_a_status_of_a_hostile_server_becomes_an_error(choice: random.Random) -> None:
    details = hostile_bytes(choice, hostile_message(choice, status_pb2.Status).SerializeToString())
    metadata = grpc.aio.Metadata(("grpc-status-details-bin", details))
    error = grpc.aio.AioRpcError(choice.choice(list(grpc.StatusCode)), grpc.aio.Metadata(), metadata, "told")
    assert isinstance(error_from_rpc(error), SpecdecError)


@fuzzed
@given(st.lists(st.tuples(st.sampled_from([TENANT_KEY, "other"]), st.text() | st.binary())))
def test_metadata_name_a_tenant_or_are_refused(metadata: list[tuple[str, str | bytes]]) -> None:
    with contextlib.suppress(SpecdecError):
        assert tenant_from_metadata(metadata).isascii()


RECORD_FIELDS = (
    "state", "epoch", "nonce", "request", "round", "store_tokens", "prompt_length", "committed_length", "finish_reason",
    "verifier_cached_length", "sample_index", "tenant", "prefix_digest",
)  # fmt: skip
SOUND_VALUES = (
    b"OPEN",
    b"CLAIMED",
    b"FINISHED",
    b"1",
    b"0",
    b"-1",
    b"ff",
    b"",
    b"LENGTH",
    b'{"prompt": ""}',
    b'{"prompt": "", "stop": 5}',
)


@fuzzed
@given(
    st.dictionaries(
        st.sampled_from([name.encode() for name in RECORD_FIELDS]), st.sampled_from(SOUND_VALUES) | st.binary()
    ),
    st.binary(),
)
def test_a_record_that_somebody_wrote_over_is_read_or_refused_with_a_reason(
    fields: dict[bytes, bytes], tokens: bytes
) -> None:
    with contextlib.suppress(SpecdecError):
        decode_record(fields, tokens)


@fuzzed
@given(st.binary())
def test_tokens_of_a_record_are_whole_numbers_whatever_the_bytes(data: bytes) -> None:
    assert len(decode_tokens(data)) == len(data) // 4


SETTINGS = {VerifierSettings: "SPECDEC_VERIFIER_", DrafterSettings: "SPECDEC_DRAFTER_", OrchestratorSettings: ""}
SETTING_VALUES = st.text() | st.integers() | st.floats() | st.sampled_from(["127.0.0.1:0", "redis://x", "a,b:1", "[]"])


@pytest.mark.parametrize(
    "role", [VerifierSettings, DrafterSettings, OrchestratorSettings], ids=lambda role: role.__name__
)
@fuzzed
@given(data=st.data())
def test_settings_are_sound_or_refused_by_name(role: type[pydantic.BaseModel], data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(role.model_fields)), max_size=4, unique=True))
    values = {name: data.draw(SETTING_VALUES) for name in names}
    try:
        role(**values)
    except pydantic.ValidationError as error:
        named = {str(told["loc"][0]) for told in error.errors() if told["loc"]}
        assert named <= set(role.model_fields)


@fuzzed
@given(st.text() | st.from_regex(r"\[?[0-9a-z:.]*\]?:[0-9]*"))
def test_an_endpoint_is_host_and_port_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        host, port = parse_endpoint(text)
        assert host
        assert 0 <= port < 65536


@fuzzed
@given(st.text() | st.from_regex(r"(seed|vocabulary|context|forward_ms|acceptance|end_rate)=[0-9a-z.:/-]*(,.*)?"))
def test_a_synthetic_model_is_described_well_or_refused(text: str) -> None:
    with contextlib.suppress(ModelLoadError):
        parse_synthetic(PREFIX + text)


def test_every_request_of_the_services_has_a_decoder_or_only_scalars() -> None:
    """A new request whose fields nobody fuzzes would be found here."""
    decoded = {message_class.DESCRIPTOR.full_name for message_class in DECODERS}
    for file in (generation_pb2, verifier_pb2, drafter_pb2, admin_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                request = method.input_type
                parts = {field.message_type.full_name for field in request.fields if field.message_type is not None}
                is_known = request.full_name in decoded or parts <= decoded | {"google.protobuf.Duration"}
                assert is_known, request.full_name

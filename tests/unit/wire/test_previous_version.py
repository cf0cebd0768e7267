"""Today's code and the previous version's understand each other: what that one recorded, what its descriptors read."""

import base64
import dataclasses
from typing import Any

import pytest
from google.protobuf import message_factory
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from orchestrator.record import decode_request
from specdec.v1 import admin_pb2, common_pb2, drafter_pb2, errors_pb2, generation_pb2, verifier_pb2
from tests.unit.wire.examples import EXAMPLES, SPEC, wire_form
from tests.unit.wire.filled import fill, message_types, num_choices
from tests.unit.wire.previous_version import RECORDED, as_previous, previous_class

FILES = [module.DESCRIPTOR for module in (admin_pb2, common_pb2, drafter_pb2, errors_pb2, generation_pb2, verifier_pb2)]
TODAYS = {descriptor.full_name: message_factory.GetMessageClass(descriptor) for descriptor in message_types(FILES)}


def as_dict(message: Message) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True, use_integers_for_enums=True)


def is_part_of(part: Any, whole: Any) -> bool:
    """Whether everything that the one says, the other says too."""
    if isinstance(part, dict):
        return all(key in whole and is_part_of(value, whole[key]) for key, value in part.items())
    if isinstance(part, list):
        return len(part) == len(whole) and all(map(is_part_of, part, whole))
    return bool(part == whole)


@pytest.mark.parametrize("key", RECORDED["filled"])
def test_every_message_of_the_previous_version_is_read_to_the_same_fields(key: str) -> None:
    full_name = key.split()[0]
    recorded = base64.b64decode(RECORDED["filled"][key])
    message = TODAYS[full_name].FromString(recorded)
    assert as_dict(message) == as_dict(previous_class(full_name).FromString(recorded))
    assert message.SerializeToString(deterministic=True) == recorded


@pytest.mark.parametrize("full_name", TODAYS)
def test_every_message_of_today_is_read_by_the_previous_version_and_what_it_does_not_know_survives(full_name) -> None:
    for choice in range(num_choices(TODAYS[full_name].DESCRIPTOR)):
        message = TODAYS[full_name]()
        fill(message, choice)
        try:
            previous = previous_class(full_name).FromString(message.SerializeToString())
        except KeyError:
            pytest.skip("new since")
        assert is_part_of(as_dict(previous), as_dict(message))
        assert TODAYS[full_name].FromString(previous.SerializeToString()) == message


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_the_previous_version_said_means_the_same_today(name: str) -> None:
    message_class, _, from_pb = wire_form(name)
    assert from_pb(message_class.FromString(base64.b64decode(RECORDED["examples"][name]))) == EXAMPLES[name]


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_said_today_means_to_the_previous_version_what_it_would_have_said_itself(name: str) -> None:
    message_class, to_pb, _ = wire_form(name)
    said = to_pb(EXAMPLES[name]).SerializeToString()
    understood = as_previous(said, message_class.DESCRIPTOR.full_name)
    assert understood == base64.b64decode(RECORDED["examples"][name])


def test_a_request_in_the_record_of_the_previous_version_is_read() -> None:
    assert decode_request(RECORDED["record_request"].encode()) == dataclasses.replace(SPEC, prompt="")

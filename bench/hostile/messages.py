"""Messages that no honest peer sends: well-formed protobuf with absurd values, and bytes that are hardly protobuf.

Works on any message class by its descriptor, from a random generator that the caller seeds. Knows no service.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

AnyMessage = TypeVar("AnyMessage", bound=Message)

MAX_DEPTH = 5
MAX_REPEATED = 6
MAX_BYTES = 64
_FIELD_SHARE = 0.6
"""Of the fields that may be set, so many are."""
_ONEOF_SHARE = 0.95
_DEEPER_SHARE = 0.7

_INTEGERS = (0, 1, -1, 2, 7, 255, 4096, 1 << 20)
_INT32 = (*_INTEGERS, (1 << 31) - 1, -(1 << 31))
_INT64 = (*_INT32, 1 << 40, (1 << 63) - 1, -(1 << 63))
_FLOATS = (0.0, -0.0, 1.0, 0.5, -1.0, 1e-45, 1e308, -1e308, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "a", "x" * 65, "x" * 5000, "\x00", "a.0", "../..", "{a}:b", "é\u202e", "127.0.0.1:1", "user", "0" * 64)


def hostile_message(
    choice: random.Random, message_class: Callable[[], AnyMessage], likely: Mapping[str, Sequence[Any]] | None = None
) -> AnyMessage:
    """A message with any of its fields set to ordinary, extreme or senseless values.

    `likely` gives values for fields by name at any depth, such as ids that exist, taken half of the time: a message
    whose every field is senseless is refused at its first.
    """
    message = message_class()
    _fill(choice, message, likely or {}, 0)
    return message


def with_hostile_fields(choice: random.Random, sound: AnyMessage, num_fields: int) -> AnyMessage:
    """A copy of a message that was sound, with so many fields at any depth set to anything."""
    message = type(sound)()
    message.CopyFrom(sound)
    for _ in range(num_fields):
        place: Message = message
        while (inner := _inner_messages(place)) and choice.random() < _DEEPER_SHARE:
            place = choice.choice(inner)
        if fields := _fields(place):
            field = choice.choice(fields)
            place.ClearField(field.name)
            _set(choice, place, field, {}, MAX_DEPTH - 1)
    return message


def hostile_bytes(choice: random.Random, serialized: bytes) -> bytes:
    """The bytes cut, repeated, overwritten or replaced; now and then as they are."""
    match choice.randrange(6):
        case 0:
            return choice.randbytes(choice.randrange(MAX_BYTES))
        case 1:
            return serialized[: choice.randrange(len(serialized) + 1)]
        case 2:
            return serialized + serialized
        case 3:
            cut = choice.randrange(len(serialized) + 1)
            return serialized[cut:] + choice.randbytes(choice.randrange(8)) + serialized[:cut]
        case 4:
            changed = bytearray(serialized)
            for _ in range(choice.randrange(1, 4) if changed else 0):
                changed[choice.randrange(len(changed))] = choice.randrange(256)
            return bytes(changed)
        case _:
            return serialized


def _fill(choice: random.Random, message: Message, likely: Mapping[str, Sequence[Any]], depth: int) -> None:
    alternatives: dict[str, list[FieldDescriptor]] = {}
    for field in _fields(message):
        oneof = field.containing_oneof
        if oneof is not None and len(oneof.fields) > 1:
            alternatives.setdefault(oneof.name, []).append(field)
        elif choice.random() < _FIELD_SHARE:
            _set(choice, message, field, likely, depth)
    for fields in alternatives.values():
        if choice.random() < _ONEOF_SHARE:
            _set(choice, message, choice.choice(fields), likely, depth)


def _fields(message: Message) -> list[FieldDescriptor]:
    return cast(list[FieldDescriptor], list(message.DESCRIPTOR.fields))  # the stubs know two kinds of descriptors


def _inner_messages(message: Message) -> list[Message]:
    inner: list[Message] = []
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            inner.extend(value if field.is_repeated else [value])
    return inner


def _set(
    choice: random.Random, message: Message, field: FieldDescriptor, likely: Mapping[str, Sequence[Any]], depth: int
) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
        for _ in range(choice.randrange(MAX_REPEATED)):
            getattr(message, field.name)[_scalar(choice, key, likely)] = _scalar(choice, value, likely)
    elif field.message_type is not None:
        if depth >= MAX_DEPTH:
            return
        if field.is_repeated:
            for _ in range(choice.randrange(MAX_REPEATED)):
                _fill(choice, getattr(message, field.name).add(), likely, depth + 1)
        else:
            getattr(message, field.name).SetInParent()
            _fill(choice, getattr(message, field.name), likely, depth + 1)
    elif field.is_repeated:
        getattr(message, field.name).extend(
            _scalar(choice, field, likely) for _ in range(choice.randrange(MAX_REPEATED))
        )
    else:
        setattr(message, field.name, _scalar(choice, field, likely))


def _scalar(choice: random.Random, field: FieldDescriptor, likely: Mapping[str, Sequence[Any]]) -> Any:
    if field.name in likely and choice.random() < 0.5:
        return choice.choice(likely[field.name])
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_INT32:
            return choice.choice(_INT32)
        case FieldDescriptor.CPPTYPE_INT64:
            return choice.choice(_INT64)
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return choice.choice(_FLOATS)
        case FieldDescriptor.CPPTYPE_BOOL:
            return choice.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM if field.enum_type is not None:
            return choice.choice((*(value.number for value in field.enum_type.values), 99, -1))
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return choice.randbytes(choice.choice((0, 1, 16, 32, MAX_BYTES, 3000)))
        case FieldDescriptor.CPPTYPE_STRING:
            return choice.choice(_TEXTS)
    raise ValueError(f"{field.full_name}: these protos have no such type")

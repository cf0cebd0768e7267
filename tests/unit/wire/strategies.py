"""Any valid dataclass, and any protobuf message however senseless, as hypothesis strategies."""

import collections.abc
import dataclasses
import types
import typing
from enum import Enum
from typing import Any, Union

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

from specdec.messages import SparseDistribution, TokenLogprob
from specdec.params import ChatMessage, GenerationSpec

INT32 = st.integers(0, 2**31 - 1)
DURATION_S = st.integers(0, 10**9).map(lambda ticks: ticks / 512)  # 1/512 s is a whole number of nanoseconds
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
TOKENS = st.lists(INT32, max_size=8).map(tuple)
SESSION_IDS = st.from_regex(r"[A-Za-z0-9_-]{1,64}(\.(0|[1-9][0-9]?))?", fullmatch=True)
BY_NAME: dict[str, st.SearchStrategy[Any]] = {
    "session_id": SESSION_IDS,
    "sample_session_ids": st.lists(SESSION_IDS, max_size=4).map(tuple),
    "sample_index": st.integers(0, 15),
    "tenant": st.from_regex(r"[A-Za-z0-9_-]{0,64}", fullmatch=True),
    "epoch": st.integers(1, 2**63 - 1),
    "attachment_id": st.integers(1, 2**63 - 1),
    "round": st.integers(0, 2**63 - 1),
    "owner_nonce": st.binary(min_size=16, max_size=64),
    "attach_key": st.binary(min_size=1, max_size=64),
    "prompt": st.one_of(TEXT, TOKENS, st.lists(st.builds(ChatMessage, TEXT, TEXT), min_size=1, max_size=3).map(tuple)),
}
BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: INT32,
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: TEXT,
    bytes: st.binary(max_size=40),
}


def instances(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Valid instances of a dataclass of specdec.messages or specdec.params; sequences are tuples."""
    if cls is SparseDistribution:
        probs = st.lists(st.floats(0, 1, width=32), max_size=4).map(tuple)
        return st.builds(SparseDistribution, TOKENS, probs)
    if cls is TokenLogprob:
        return st.builds(TokenLogprob, INT32, st.floats(allow_nan=False, width=32))
    hints = typing.get_type_hints(cls)
    fields = {field.name: _values(hints[field.name], field.name) for field in dataclasses.fields(cls)}
    made = st.builds(cls, **fields)
    for tokens in ("committed_token_ids", "known_token_ids"):
        if {"prompt_length", tokens} <= fields.keys():
            made = made.map(lambda instance, tokens=tokens: _with_prompt_length(instance, tokens))
    if "recorded_epoch" in fields:
        made = made.map(_with_recorded_epoch)
    return made


def _with_recorded_epoch(instance: Any) -> Any:
    """Of an earlier owner, where there is anything of its."""
    recorded_epoch = min(instance.epoch, max(1, instance.recorded_epoch)) if instance.recorded_token_ids else 0
    return dataclasses.replace(instance, recorded_epoch=recorded_epoch)


def _with_prompt_length(instance: Any, tokens: str) -> Any:
    num_tokens = len(getattr(instance, tokens))
    least = min(1, num_tokens) if tokens == "known_token_ids" else 0
    return dataclasses.replace(instance, prompt_length=max(least, min(instance.prompt_length, num_tokens)))


def _values(hint: Any, name: str) -> st.SearchStrategy[Any]:
    hint = getattr(hint, "__supertype__", hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return instances(hint)
    if name in BY_NAME:
        return BY_NAME[name]
    if origin in (types.UnionType, Union):
        return st.one_of(*(st.none() if part is type(None) else _values(part, name) for part in arguments))
    if origin is collections.abc.Mapping:
        return st.dictionaries(INT32, BY_TYPE[float], max_size=4)
    if origin in (tuple, collections.abc.Sequence):
        return st.lists(_values(arguments[0], ""), max_size=4).map(tuple)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    if name.endswith("_s"):
        return DURATION_S
    if name == "num_samples":
        return st.integers(1, 2**31 - 1)
    return BY_TYPE[hint]


SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(-1, 40),
}


@st.composite
def messages(draw: st.DrawFn, cls: type[Message]) -> Message:
    """Messages of a protobuf class with any subset of fields, each of any value that its type can carry."""
    message = cls()
    fields = list(cls.DESCRIPTOR.fields)
    for field in draw(st.lists(st.sampled_from(fields), unique=True)) if fields else ():
        target = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            target.update(draw(st.dictionaries(SCALARS[FieldDescriptor.CPPTYPE_INT32], st.floats(), max_size=3)))
        elif field.message_type is not None:
            part = messages(field.message_type._concrete_class)
            if field.is_repeated:
                target.extend(draw(st.lists(part, max_size=2)))
            else:
                target.CopyFrom(draw(part))
                target.SetInParent()
        else:
            values = _scalars(field)
            if field.is_repeated:
                target.extend(draw(st.lists(values, max_size=3)))
            else:
                setattr(message, field.name, draw(values))
    return message


def _scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=80)
    if field.type == FieldDescriptor.TYPE_STRING:
        return st.one_of(BY_NAME["session_id"], TEXT)
    return SCALARS[field.cpp_type]


GENERATION_SPECS = instances(GenerationSpec)

"""The previous version's messages: what it recorded, and its classes, built from its own descriptors."""

import json
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

FOLDER = Path(__file__).parents[2] / "data" / "wire_v0.1"
RECORDED: dict[str, Any] = json.loads((FOLDER / "recorded.json").read_text())


def _pool() -> descriptor_pool.DescriptorPool:
    files = descriptor_pb2.FileDescriptorSet.FromString((FOLDER / "descriptors.binpb").read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    return pool


_POOL = _pool()


def previous_class(full_name: str) -> type[Message]:
    """The previous version's class of a message. Raises KeyError for one that it does not have."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(full_name))


def as_previous(data: bytes, full_name: str) -> bytes:
    """What a peer of the previous version understands of a message, or would have sent in its place."""
    message = previous_class(full_name).FromString(data)
    message.DiscardUnknownFields()
    return message.SerializeToString()

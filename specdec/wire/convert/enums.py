"""Enums by name: FinishReason.LENGTH is FINISH_REASON_LENGTH. An enum that differs from its proto fails at import."""

import re
from enum import Enum
from typing import TYPE_CHECKING, Generic, TypeVar

from specdec import messages, params
from specdec.errors import MalformedRequestError
from specdec.v1 import common_pb2, verifier_pb2

if TYPE_CHECKING:
    from google.protobuf.internal.enum_type_wrapper import _EnumTypeWrapper

Member = TypeVar("Member", bound=Enum)
WireValue = TypeVar("WireValue", bound=int)


class EnumCodec(Generic[Member, WireValue]):
    """Maps the members of a Python enum to the values of the proto enum of the same names, and back."""

    def __init__(self, members: type[Member], wire: "_EnumTypeWrapper[WireValue]") -> None:
        self._name = wire.DESCRIPTOR.name
        prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", self._name).upper() + "_"
        self._unspecified = wire.Value(f"{prefix}UNSPECIFIED")
        self._wire_values = {member: wire.Value(prefix + member.value) for member in members}
        self._members = {int(value): member for member, value in self._wire_values.items()}
        if set(self._members) | {int(self._unspecified)} != {int(value) for value in wire.values()}:
            raise TypeError(f"{members.__qualname__} and the proto enum {self._name} have different members")

    def to_pb(self, member: Member | None) -> WireValue:
        """None is UNSPECIFIED."""
        return self._unspecified if member is None else self._wire_values[member]

    def optional_from_pb(self, value: int) -> Member | None:
        """UNSPECIFIED is None; raises MalformedRequestError for a value that this version does not know."""
        if value == self._unspecified:
            return None
        return self.from_pb(value)

    def from_pb(self, value: int) -> Member:
        """Raises MalformedRequestError for UNSPECIFIED and for a value that this version does not know."""
        member = self._members.get(value)
        if member is None:
            raise MalformedRequestError(f"{self._name}: {value} is not a known value", field=self._name)
        return member


ACCEPTANCE_RULE = EnumCodec(params.AcceptanceRule, common_pb2.AcceptanceRule)
FINISH_REASON = EnumCodec(params.FinishReason, common_pb2.FinishReason)
NEXT_TOKEN_KIND = EnumCodec(params.NextTokenKind, common_pb2.NextTokenKind)
DROP_REASON = EnumCodec(messages.DropReason, verifier_pb2.DropReason)
REFUSAL_REASON = EnumCodec(messages.RefusalReason, verifier_pb2.RefusalReason)
ATTACH_REFUSAL = EnumCodec(messages.AttachRefusal, verifier_pb2.AttachRefusal)
DETACH_REASON = EnumCodec(messages.DetachReason, verifier_pb2.DetachReason)
ATTACHMENT_STATE = EnumCodec(messages.AttachmentState, verifier_pb2.AttachmentState)

"""One message of each kind with every field set, alike in every version that has the field. Knows descriptors alone."""

from collections.abc import Iterable, Iterator

from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message import Message

MAX_DEPTH = 4
"""No message of ours is deeper; one that held itself would never end."""


def message_types(files: Iterable[FileDescriptor]) -> Iterator[Descriptor]:
    """Messages of the files, those for maps left out."""
    for file in files:
        yield from (file.message_types_by_name[name] for name in sorted(file.message_types_by_name))


def fill(message: Message, choice: int, depth: int = MAX_DEPTH) -> None:
    """Sets every field; of each oneof the `choice`-th one, counted around."""
    for field in message.DESCRIPTOR.fields:
        oneof = field.containing_oneof
        if oneof is not None and len(oneof.fields) > 1 and oneof.fields[choice % len(oneof.fields)] is not field:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, field.name)[field.number] = 0.5
        elif field.message_type is not None:
            part = getattr(message, field.name)
            inner = part.add() if field.is_repeated else part
            inner.SetInParent()
            if depth > 1:
                fill(inner, choice, depth - 1)
        elif field.is_repeated:
            getattr(message, field.name).extend([_value(field), _value(field)])
        else:
            setattr(message, field.name, _value(field))


def num_choices(descriptor: Descriptor) -> int:
    """How many choices there are that differ in the message itself."""
    return max((len(oneof.fields) for oneof in descriptor.oneofs), default=1)


def _value(field: FieldDescriptor) -> object:
    if field.enum_type is not None:
        return field.enum_type.values[-1 if len(field.enum_type.values) == 1 else 1].number
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            value = f"{field.name}-é"
            return value.encode() if field.type == FieldDescriptor.TYPE_BYTES else value
        case FieldDescriptor.CPPTYPE_BOOL:
            return True
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return field.number + 0.25
        case _:
            return 1000 + field.number

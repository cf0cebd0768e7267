"""Records what a version of this system puts on the wire and into the record. Run once for each version:

    git archive VERSION specdec orchestrator protos | tar -x -C OLD
    cd / && PYTHONPATH=OLD:MAIN python -m tests.unit.wire.record_version OLD/protos MAIN/tests/data/wire_vX.Y

`specdec` is then the old one, and this file and its examples are today's.
"""

import base64
import json
import subprocess
import sys
from pathlib import Path

from google.protobuf import message_factory

from orchestrator.record import encode_request
from specdec.v1 import admin_pb2, common_pb2, drafter_pb2, errors_pb2, generation_pb2, verifier_pb2
from tests.unit.wire.examples import EXAMPLES, SPEC, wire_form
from tests.unit.wire.filled import fill, message_types, num_choices

MODULES = (admin_pb2, common_pb2, drafter_pb2, errors_pb2, generation_pb2, verifier_pb2)


def main(protos: str, folder: str) -> None:
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    compiler = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={protos}", "--include_imports"]
    files = [f"specdec/v1/{name}.proto" for name in ("admin", "common", "drafter", "errors", "generation", "verifier")]
    subprocess.run([*compiler, f"--descriptor_set_out={out / 'descriptors.binpb'}", *files], check=True)
    filled = {}
    for descriptor in message_types(module.DESCRIPTOR for module in MODULES):
        for choice in range(num_choices(descriptor)):
            message = message_factory.GetMessageClass(descriptor)()
            fill(message, choice)
            filled[f"{descriptor.full_name} {choice}"] = _text(message.SerializeToString(deterministic=True))
    examples = {name: _text(wire_form(name)[1](value).SerializeToString()) for name, value in EXAMPLES.items()}
    recorded = {"filled": filled, "examples": examples, "record_request": encode_request(SPEC).decode()}
    (out / "recorded.json").write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The error tree and the catalogue of reasons are one and the same."""

import re
from pathlib import Path

import grpc
import pytest
from grpc_status import rpc_status

from specdec.errors import ModelLoadError, OverloadedError, SpecdecError
from specdec.v1 import errors_pb2
from specdec.wire.interceptors import error_from_rpc, status_from_error

PROTOS = Path(__file__).parents[3] / "protos/specdec/v1"
CLASSES = [cls for cls in SpecdecError.__subclasses__() if cls is not ModelLoadError]


def as_raised_at_the_caller(error: SpecdecError) -> grpc.aio.AioRpcError:
    status = rpc_status.to_status(status_from_error(error))
    return grpc.aio.AioRpcError(
        status.code, grpc.aio.Metadata(), grpc.aio.Metadata(*status.trailing_metadata), details=status.details
    )


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_each_error_comes_back_as_itself(cls: type[SpecdecError]) -> None:
    error = error_from_rpc(as_raised_at_the_caller(cls("why", retry_after_s=2.5, field="seed")))
    assert type(error) is cls
    assert (error.message, error.retry_after_s, error.metadata) == ("why", 2.5, {"field": "seed"})


def test_the_catalogue_names_every_reason_and_no_other() -> None:
    catalogue = {name.removeprefix("ERROR_REASON_") for name in errors_pb2.ErrorReason.keys()}  # noqa: SIM118
    assert {cls.reason for cls in (SpecdecError, *CLASSES)} == catalogue - {"UNSPECIFIED"}


def test_the_catalogue_states_the_status_code_that_each_error_has() -> None:
    stated = re.findall(r"// ([A-Z_]+): .*\n  ERROR_REASON_(\w+) = ", (PROTOS / "errors.proto").read_text())
    assert {reason: status for status, reason in stated} == {cls.reason: cls.status for cls in (SpecdecError, *CLASSES)}


def test_a_reason_of_a_later_version_is_an_error_all_the_same() -> None:
    class LaterError(OverloadedError):
        reason = "OF_A_LATER_VERSION"

    error = error_from_rpc(as_raised_at_the_caller(LaterError("why")))
    assert type(error) is SpecdecError
    assert error.message == "why"


def test_details_of_another_domain_or_without_sense_are_not_taken_for_ours() -> None:
    garbage = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff"))
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), garbage, details="gone")
    assert error_from_rpc(error).reason == "PEER_UNAVAILABLE"

"""What a server says of itself."""

from specdec.messages import Load, ModelInfo, Numerics, SelfCheck, ServerStatus
from specdec.v1 import common_pb2 as pb
from specdec.wire.convert.scalars import duration_from_pb, duration_to_pb


def numerics_to_pb(numerics: Numerics) -> pb.Numerics:
    return pb.Numerics(
        fingerprint=numerics.fingerprint,
        weights_digest=numerics.weights_digest,
        weights_dtype=numerics.weights_dtype,
        compute_dtype=numerics.compute_dtype,
        device=numerics.device,
        linear_kernel=numerics.linear_kernel,
        attention_kernel=numerics.attention_kernel,
        libraries=numerics.libraries,
    )


def numerics_from_pb(message: pb.Numerics) -> Numerics:
    return Numerics(
        fingerprint=message.fingerprint,
        weights_digest=message.weights_digest,
        weights_dtype=message.weights_dtype,
        compute_dtype=message.compute_dtype,
        device=message.device,
        linear_kernel=message.linear_kernel,
        attention_kernel=message.attention_kernel,
        libraries=message.libraries,
    )


def model_info_to_pb(model: ModelInfo) -> pb.ModelInfo:
    return pb.ModelInfo(
        name=model.name,
        vocabulary_size=model.vocabulary_size,
        context_limit=model.context_limit,
        tokenizer_fingerprint=model.tokenizer_fingerprint,
        numerics=None if model.numerics is None else numerics_to_pb(model.numerics),
    )


def model_info_from_pb(message: pb.ModelInfo) -> ModelInfo:
    return ModelInfo(
        name=message.name,
        vocabulary_size=message.vocabulary_size,
        context_limit=message.context_limit,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        numerics=numerics_from_pb(message.numerics) if message.HasField("numerics") else None,
    )


def _self_check_to_pb(check: SelfCheck) -> pb.SelfCheck:
    return pb.SelfCheck(
        passed=check.passed,
        max_rows=check.max_rows,
        safe_row_counts=check.safe_row_counts,
        num_comparisons=check.num_comparisons,
        detail=check.detail,
        elapsed=duration_to_pb(check.elapsed_s),
    )


def _self_check_from_pb(message: pb.SelfCheck) -> SelfCheck:
    return SelfCheck(
        passed=message.passed,
        max_rows=message.max_rows,
        safe_row_counts=tuple(message.safe_row_counts),
        num_comparisons=message.num_comparisons,
        detail=message.detail,
        elapsed_s=duration_from_pb(message.elapsed, "elapsed"),
    )


def _load_to_pb(load: Load) -> pb.Load:
    return pb.Load(
        num_active_sessions=load.num_active_sessions,
        num_waiting_sessions=load.num_waiting_sessions,
        kv_used_bytes=load.kv_used_bytes,
        kv_budget_bytes=load.kv_budget_bytes,
        num_attachments=load.num_attachments,
        max_waiting_sessions=load.max_waiting_sessions,
        queue_wait=duration_to_pb(load.queue_wait_s),
    )


def _load_from_pb(message: pb.Load) -> Load:
    return Load(
        num_active_sessions=message.num_active_sessions,
        num_waiting_sessions=message.num_waiting_sessions,
        kv_used_bytes=message.kv_used_bytes,
        kv_budget_bytes=message.kv_budget_bytes,
        num_attachments=message.num_attachments,
        max_waiting_sessions=message.max_waiting_sessions if message.HasField("max_waiting_sessions") else None,
        queue_wait_s=duration_from_pb(message.queue_wait, "queue_wait"),
    )


def server_status_to_pb(status: ServerStatus) -> pb.ServerStatus:
    return pb.ServerStatus(
        version=status.version,
        protocol_version=status.protocol_version,
        serving=status.serving,
        draining=status.draining,
        model=None if status.model is None else model_info_to_pb(status.model),
        self_check=None if status.self_check is None else _self_check_to_pb(status.self_check),
        load=_load_to_pb(status.load),
        proposer=status.proposer,
    )


def server_status_from_pb(message: pb.ServerStatus) -> ServerStatus:
    return ServerStatus(
        serving=message.serving,
        draining=message.draining,
        version=message.version,
        protocol_version=message.protocol_version,
        model=model_info_from_pb(message.model) if message.HasField("model") else None,
        self_check=_self_check_from_pb(message.self_check) if message.HasField("self_check") else None,
        load=_load_from_pb(message.load),
        proposer=message.proposer,
    )

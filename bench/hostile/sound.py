"""One message of each kind as an honest peer would send it, most fields set."""

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from specdec.v1 import common_pb2, drafter_pb2, generation_pb2, verifier_pb2


def sound_messages() -> tuple[Message, ...]:
    sampling = common_pb2.SamplingParameters(
        temperature=0.8,
        top_k=20,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={5: 1.5},
        banned_token_ids=[7],
        min_tokens=2,
        seed=3,
        acceptance_rule=common_pb2.ACCEPTANCE_RULE_COUPLED,
    )
    spec = common_pb2.GenerationSpec(
        model="target",
        tokens=common_pb2.TokenPrompt(token_ids=[1, 2, 3]),
        sampling=sampling,
        stop=common_pb2.StopCriteria(max_new_tokens=8, stop_strings=["end"], stop_token_ids=[9]),
        speculation=common_pb2.SpeculationOptions(max_draft_tokens=4, max_draft_wait=Duration(nanos=1000)),
        num_logprobs=1,
        num_samples=2,
        num_prompt_logprobs=0,
    )
    logprobs = [
        common_pb2.PositionLogprobs(
            chosen=common_pb2.TokenLogprob(token_id=4, logprob=-1.0),
            alternatives=[common_pb2.TokenLogprob(token_id=5, logprob=-0.5)],
        )
    ]
    statistics = common_pb2.RoundStatistics(
        num_draft_tokens=3,
        num_accepted_tokens=1,
        next_token_kind=common_pb2.NEXT_TOKEN_KIND_RECOVERED,
        total_time=Duration(nanos=5),
        verify_forward_time=Duration(nanos=4),
        draft_time=Duration(nanos=3),
        round_trip_time=Duration(nanos=2),
        queue_time=Duration(nanos=1),
    )
    numerics = common_pb2.Numerics(fingerprint="f" * 64, weights_digest="w" * 64, device="cpu")
    commit = verifier_pb2.Commit(
        round=1, base_position=3, token_ids=[4], text="a", logprobs=logprobs, statistics=statistics, cached_length=3
    )
    draft = verifier_pb2.Draft(epoch=1, draft_sequence=1, start_position=3, draft_token_ids=[4, 5, 6])
    verdict = verifier_pb2.Verdict(
        draft_sequence=1,
        round=1,
        base_position=3,
        num_accepted_tokens=1,
        committed_token_ids=[4, 5],
        committed_length=5,
    )
    return (
        spec,
        verifier_pb2.OpenSessionRequest(
            session_id="sound",
            epoch=2,
            owner_nonce=b"n" * 16,
            spec=spec,
            committed_token_ids=[1, 2, 3, 4],
            prompt_length=3,
            tenant="t",
            sample_index=1,
            recorded_token_ids=[5],
            recorded_epoch=1,
        ),
        verifier_pb2.SessionEvent(commit=commit),
        verifier_pb2.VerifyRequest(attachment_id=1, session_id="sound", draft=draft),
        verifier_pb2.VerifyResponse(attachment_id=1, session_id="sound", verdict=verdict),
        drafter_pb2.AttachSessionRequest(
            session_id="sound",
            epoch=1,
            verifier_endpoint="127.0.0.1:1",
            attachment_id=1,
            attach_key=b"k" * 32,
            sampling=sampling,
            speculation=spec.speculation,
            known_token_ids=[1, 2, 3],
            prompt_length=3,
            acceptance_rule=common_pb2.ACCEPTANCE_RULE_COUPLED,
        ),
        generation_pb2.GenerationEvent(
            delta=generation_pb2.Delta(
                text="a", token_ids=[4], position=3, logprobs=logprobs, round=statistics, token_texts=["a"]
            )
        ),
        common_pb2.ServerStatus(
            version="0.1.0",
            protocol_version=1,
            serving=True,
            model=common_pb2.ModelInfo(name="target", vocabulary_size=512, context_limit=64, numerics=numerics),
            self_check=common_pb2.SelfCheck(
                passed=True, max_rows=8, safe_row_counts=[1, 2], elapsed=Duration(seconds=1)
            ),
            load=common_pb2.Load(num_active_sessions=1, kv_used_bytes=5, kv_budget_bytes=10),
        ),
    )


def sound_requests(verifier_endpoint: str) -> tuple[Message, ...]:
    """Requests that a server takes: short outputs, and a session that a drafter may be told to join."""
    spec = common_pb2.GenerationSpec(text="hello", stop=common_pb2.StopCriteria(max_new_tokens=2))
    prompt = common_pb2.GenerationSpec(
        tokens=common_pb2.TokenPrompt(token_ids=[300, 301]), stop=common_pb2.StopCriteria(max_new_tokens=2)
    )
    attach = verifier_pb2.Attach(
        epoch=1, attach_key=b"k" * 32, known_digest=b"d" * 32, protocol_version=1, vocabulary_size=4096
    )
    return (
        generation_pb2.GenerateRequest(spec=spec),
        generation_pb2.GenerateRequest(spec=prompt, session_id="stranger"),
        generation_pb2.ResumeRequest(session_id="stranger", received_token_ids=[4]),
        generation_pb2.CancelRequest(session_id="stranger"),
        verifier_pb2.OpenSessionRequest(session_id="stranger", epoch=1, owner_nonce=b"n" * 16, spec=spec),
        verifier_pb2.VerifyRequest(attachment_id=1, session_id="stranger", attach=attach),
        drafter_pb2.AttachSessionRequest(
            session_id="stranger",
            epoch=1,
            verifier_endpoint=verifier_endpoint,
            attachment_id=1,
            attach_key=b"k" * 32,
            known_token_ids=[300, 301],
            prompt_length=2,
        ),
        drafter_pb2.DetachSessionRequest(session_id="stranger", attachment_id=1),
    )

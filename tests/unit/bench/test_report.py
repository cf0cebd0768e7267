import json

import pytest

from specdec.bench.records import PeerGeneration, TopTwo
from specdec.bench.report import build_report
from tests.unit.bench.synthetic import DRAFT, NGRAM, plain, prompt_record, recording, speculative, verify_round

_REQUIRED_KEYS = {
    "proposer",
    "category",
    "prompts",
    "mismatching_prompts",
    "target_only_tokens_per_s",
    "speculative_tokens_per_s",
    "speedup",
    "acceptance_rate",
    "acceptance_rate_per_position",
    "acceptance_length",
    "round_ms",
}


def test_every_promised_key_is_there_and_the_report_is_plain_json() -> None:
    ours = speculative(range(10), [verify_round(4, 2), verify_round(4, 4)])
    report = build_report(recording(prompt_record("a", "code", plain(range(10)), {"ngram": ours})))
    assert {"commit", "machine", "settings", "runs"} <= set(report)
    assert set(report["runs"][0]) >= _REQUIRED_KEYS
    assert {"total", "verify_forward", "draft", "round_trip", "other"} <= set(report["runs"][0]["round_ms"])
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_a_prompt_whose_ids_differ_is_counted() -> None:
    same = prompt_record("a", "code", plain([1, 2, 3]), {"ngram": speculative([1, 2, 3], [verify_round(2, 2)])})
    other_token = prompt_record("b", "code", plain([1, 2, 3]), {"ngram": speculative([1, 9, 3], [verify_round(2, 2)])})
    shorter = prompt_record("c", "code", plain([1, 2, 3]), {"ngram": speculative([1, 2], [verify_round(1, 1)])})
    report = build_report(recording(same, other_token, shorter))
    assert report["runs"][0]["mismatching_prompts"] == 2
    assert [prompt["identical"] for prompt in report["runs"][0]["per_prompt"]] == [True, False, False]
    assert report["summary"][0]["mismatching_prompts"] == 2


def test_speedup_is_the_median_of_the_prompts_own_ratios() -> None:
    records = [
        prompt_record(name, "qa", plain(range(10), off_s), {"ngram": speculative(range(10), [], on_s)})
        for name, off_s, on_s in (("a", 10.0, 5.0), ("b", 10.0, 10.0), ("c", 40.0, 10.0))
    ]
    run = build_report(recording(*records))["runs"][0]
    assert run["speedup"] == 2.0
    assert run["target_only_tokens_per_s"] == 1.0
    assert run["speculative_tokens_per_s"] == 1.0
    assert [prompt["speedup"] for prompt in run["per_prompt"]] == [2.0, 1.0, 4.0]


def test_decode_speed_leaves_out_the_time_to_the_first_token() -> None:
    run = build_report(
        recording(prompt_record("a", "qa", plain(range(10), 10.0), {"ngram": speculative(range(10), [], 4.0)}))
    )["runs"][0]
    assert run["target_only_decode_tokens_per_s"] == 1.0  # 9 tokens in 10 - 1 s
    assert run["speculative_decode_tokens_per_s"] == 3.0  # 9 tokens in 4 - 1 s
    assert run["decode_speedup"] == 3.0
    assert run["time_to_first_token_ms"] == {"target_only": 1000.0, "speculative": 1000.0}


def test_acceptance_counts_draft_tokens_alone_and_its_length_the_next_token_too() -> None:
    rounds = [verify_round(0, 0), verify_round(4, 1), verify_round(2, 2), verify_round(1, 1, ended=True)]
    run = build_report(recording(prompt_record("a", "qa", plain([1]), {"ngram": speculative([1], rounds)})))["runs"][0]
    assert run["acceptance_rate"] == pytest.approx(4 / 7)
    assert run["acceptance_rate_per_position"] == [1.0, 0.5, 0.0, 0.0]
    assert run["acceptance_length"] == pytest.approx((2 + 3 + 2) / 3)


def test_round_times_leave_out_the_prefill_and_rounds_without_a_draft() -> None:
    rounds = [
        verify_round(1, 1, total_ms=900.0),  # holds the prefill
        verify_round(0, 0, total_ms=500.0),
        verify_round(2, 1, total_ms=20.0, forward_ms=10.0, draft_ms=6.0, round_trip_ms=1.0),
        verify_round(2, 1, total_ms=22.0, forward_ms=10.0, draft_ms=6.0, round_trip_ms=2.0),
        verify_round(2, 1, total_ms=90.0, forward_ms=70.0, draft_ms=6.0, round_trip_ms=2.0),
    ]
    run = build_report(recording(prompt_record("a", "qa", plain([1]), {"ngram": speculative([1], rounds)})))["runs"][0]
    assert run["round_ms"] == pytest.approx(
        {
            "total": 22.0,
            "verify_forward": 10.0,
            "draft": 6.0,
            "round_trip": 2.0,
            "other": 4.0,
            "beside_forward": 6.0,
            "queue": 0.0,
        }
    )


def test_a_lane_that_never_drafted_has_no_acceptance_rather_than_zero() -> None:
    run = build_report(recording(prompt_record("a", "qa", plain([1]), {"ngram": speculative([1], [])})))["runs"][0]
    assert run["acceptance_rate"] is None
    assert run["acceptance_length"] is None
    assert run["acceptance_rate_per_position"] == []
    assert set(run["round_ms"].values()) == {None}


def test_an_interrupted_prompt_is_left_out_of_the_lane_that_lacks_a_side() -> None:
    whole = prompt_record("a", "qa", plain([1, 2]), {lane.label: speculative([1, 2], []) for lane in (NGRAM, DRAFT)})
    half = prompt_record("b", "qa", plain([1, 2]), {"ngram": speculative([1, 2], [])})
    no_target = prompt_record("c", "code", None, {"ngram": speculative([1, 2], [])})
    taken = recording(whole, half, no_target, lanes=(NGRAM, DRAFT))
    taken.complete, taken.ended_by = False, "interrupted"
    report = build_report(taken)
    assert [(run["label"], run["category"], run["prompts"]) for run in report["runs"]] == [
        ("ngram", "qa", 2),
        ("draft_model:small:int8", "qa", 1),
    ]
    assert (report["complete"], report["ended_by"]) == (False, "interrupted")


def test_runs_stand_for_one_proposer_and_one_category_each() -> None:
    records = [
        prompt_record(category, category, plain([1]), {lane.label: speculative([1], []) for lane in (NGRAM, DRAFT)})
        for category in ("code", "qa")
    ]
    runs = build_report(recording(*records, lanes=(NGRAM, DRAFT)))["runs"]
    assert [(run["proposer"], run["category"]) for run in runs] == [
        ("ngram", "code"),
        ("ngram", "qa"),
        ("draft_model", "code"),
        ("draft_model", "qa"),
    ]
    assert (runs[2]["draft_model"], runs[2]["quantization"]) == ("small", "int8")


def test_summary_means_over_categories_and_names_the_lowest() -> None:
    records = [
        prompt_record(category, category, plain(range(10), 10.0), {"ngram": speculative(range(10), [], on_s)})
        for category, on_s in (("code", 2.0), ("qa", 5.0), ("rag", 10.0))
    ]
    summary = build_report(recording(*records))["summary"][0]
    assert summary["speedup"] == {"code": 5.0, "others": 1.5}
    assert summary["lowest_category_speedup"] == 1.0


def test_peers_are_compared_over_the_same_prompts() -> None:
    modes = ("transformers_greedy", "transformers_prompt_lookup")
    ids = tuple(range(10))
    record = prompt_record(
        "a",
        "code",
        plain(ids, 10.0),
        {"ngram": speculative(ids, [], 2.0)},
        {modes[0]: PeerGeneration(ids, 7, 20.0), modes[1]: PeerGeneration((*ids[:5], 99), 7, 3.0)},
    )
    report = build_report(recording(record, peer_modes=modes))
    assert report["runs"][0]["peers_tokens_per_s"] == {modes[0]: 0.5, modes[1]: 2.0}
    assert report["summary"][0]["over_best_peer"] == {"code": 2.5, "others": None}
    assert report["peers"]["agreeing_prompts"] == 1
    assert report["peers"]["mismatches_with_own_greedy"] == {modes[1]: 1}


def test_where_peers_differ_the_first_place_and_the_gap_are_told() -> None:
    record = prompt_record("a", "qa", plain([1, 2, 3]), {}, {"transformers_greedy": PeerGeneration((1, 5, 3), 8, 1.0)})
    record.top_two = TopTwo((5, 2), (4.5, 4.25))
    peers = build_report(recording(record, peer_modes=["transformers_greedy"]))["peers"]
    assert (peers["prompts"], peers["agreeing_prompts"], peers["differently_tokenised_prompts"]) == (1, 0, 1)
    assert peers["disagreements"] == [
        {
            "id": "a",
            "category": "qa",
            "first_difference": 1,
            "our_token_id": 2,
            "their_token_id": 5,
            "top_token_ids": [5, 2],
            "gap": 0.25,
        }
    ]

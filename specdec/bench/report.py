"""From a recording to the JSON that later work reads. Pure. `figures` defines each figure, `peer_report` the rest."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from specdec.bench import figures
from specdec.bench.peer_report import build_peer_report
from specdec.bench.plan import Lane
from specdec.bench.records import Generation, PeerGeneration, PromptRecord, Recording

CODE = "code"
OTHERS = "others"


def build_report(recording: Recording) -> dict[str, Any]:
    """One object. Prompts of which a lane lacks either side, as after an interruption, are left out of that lane."""
    report: dict[str, Any] = {
        "commit": recording.commit,
        "machine": dict(recording.machine),
        "settings": dict(recording.settings),
        "complete": recording.complete,
        "ended_by": recording.ended_by,
        "runs": [],
        "summary": [],
    }
    for lane in recording.lanes:
        runs = [
            _run(recording, lane, category, records)
            for category, records in _by_category(_measured(recording.prompts, lane)).items()
        ]
        report["runs"] += runs
        if runs:
            report["summary"].append(_summary(lane, runs))
    if recording.peer_modes:
        report["peers"] = build_peer_report(recording)
    return report


def _run(recording: Recording, lane: Lane, category: str, records: Sequence[PromptRecord]) -> dict[str, Any]:
    pairs = [_pair(record, lane) for record in records]
    speculative = [pair[1] for pair in pairs]
    run: dict[str, Any] = {
        "proposer": lane.proposer,
        "draft_model": lane.draft_model,
        "quantization": lane.quantization,
        "label": lane.label,
        "category": category,
        "prompts": len(pairs),
        "mismatching_prompts": sum(_differ(pair) for pair in pairs),
        "target_only_tokens_per_s": figures.median(figures.tokens_per_s(pair[0]) for pair in pairs),
        "speculative_tokens_per_s": figures.median(map(figures.tokens_per_s, speculative)),
        "speedup": figures.median(map(figures.speedup, pairs)),
        "acceptance_rate": figures.acceptance_rate(speculative),
        "acceptance_rate_per_position": figures.acceptance_rate_per_position(speculative),
        "acceptance_length": figures.acceptance_length(speculative),
        "round_ms": figures.round_ms(speculative),
        "target_only_decode_tokens_per_s": figures.median(figures.decode_tokens_per_s(pair[0]) for pair in pairs),
        "speculative_decode_tokens_per_s": figures.median(map(figures.decode_tokens_per_s, speculative)),
        "decode_speedup": figures.median(figures.speedup(pair, figures.decode_tokens_per_s) for pair in pairs),
        "time_to_first_token_ms": {
            "target_only": figures.median(1000 * pair[0].first_tokens_s for pair in pairs),
            "speculative": figures.median(1000 * pair[1].first_tokens_s for pair in pairs),
        },
        "num_fallback_decodes": sum(one.statistics.num_fallback_decodes for one in speculative),
        "num_stale_drafts": sum(one.statistics.num_stale_drafts for one in speculative),
        "num_refused_drafts": sum(one.statistics.num_refused_drafts for one in speculative),
        "per_prompt": [_prompt(record, lane) for record in records],
    }
    if recording.peer_modes:
        run["peers_tokens_per_s"] = {
            mode: figures.median(_peer_rate(record.peers.get(mode)) for record in records)
            for mode in recording.peer_modes
        }
    return run


def _prompt(record: PromptRecord, lane: Lane) -> dict[str, Any]:
    target_only, speculative = pair = _pair(record, lane)
    return {
        "id": record.prompt.prompt_id,
        "identical": not _differ(pair),
        "num_prompt_tokens": target_only.num_prompt_tokens,
        "num_output_tokens": len(target_only.token_ids),
        "target_only_tokens_per_s": figures.tokens_per_s(target_only),
        "speculative_tokens_per_s": figures.tokens_per_s(speculative),
        "speedup": figures.speedup(pair),
        "decode_speedup": figures.speedup(pair, figures.decode_tokens_per_s),
        "acceptance_length": figures.acceptance_length([speculative]),
        "peers_tokens_per_s": {mode: _peer_rate(peer) for mode, peer in record.peers.items()},
    }


def _summary(lane: Lane, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures that goals are set in. Of several categories: the mean over categories."""
    groups = {
        CODE: [run for run in runs if run["category"] == CODE],
        OTHERS: [r for r in runs if r["category"] != CODE],
    }
    speedups = [run["speedup"] for run in runs if run["speedup"] is not None]
    return {
        "label": lane.label,
        "prompts": sum(run["prompts"] for run in runs),
        "mismatching_prompts": sum(run["mismatching_prompts"] for run in runs),
        "speedup": {group: _mean(run["speedup"] for run in of_group) for group, of_group in groups.items()},
        "lowest_category_speedup": min(speedups, default=None),
        "over_best_peer": {group: _over_best_peer(of_group) for group, of_group in groups.items()},
    }


def _over_best_peer(runs: Sequence[dict[str, Any]]) -> float | None:
    """Our tokens/s over those of the mode that does best on these categories together."""
    ours = _mean(run["speculative_tokens_per_s"] for run in runs)
    modes = {mode for run in runs for mode in run.get("peers_tokens_per_s", ())}
    rates = [_mean(run["peers_tokens_per_s"][mode] for run in runs) for mode in modes]
    best = max((rate for rate in rates if rate is not None), default=None)
    return ours / best if ours is not None and best else None


def _measured(records: Sequence[PromptRecord], lane: Lane) -> list[PromptRecord]:
    return [record for record in records if record.target_only is not None and lane.label in record.speculative]


def _by_category(records: Sequence[PromptRecord]) -> dict[str, list[PromptRecord]]:
    by_category: dict[str, list[PromptRecord]] = {}
    for record in records:
        by_category.setdefault(record.prompt.category, []).append(record)
    return by_category


def _pair(record: PromptRecord, lane: Lane) -> figures.Pair:
    if record.target_only is None:
        raise ValueError(f"{record.prompt.prompt_id} has no target-only output")
    return record.target_only, record.speculative[lane.label]


def _differ(pair: tuple[Generation, Generation]) -> bool:
    return pair[0].token_ids != pair[1].token_ids


def _peer_rate(peer: PeerGeneration | None) -> float | None:
    return None if peer is None else len(peer.token_ids) / peer.elapsed_s


def _mean(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return statistics.fmean(present) if present else None

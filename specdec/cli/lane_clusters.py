"""Ways of speculating side by side: one verifier for all, drafters and an orchestrator for each, so that they can take
turns. Knows what a lane needs started; refuses to know what it is asked."""

import contextlib
import dataclasses
from collections.abc import Sequence

from specdec.bench.plan import Lane
from specdec.cli.cluster_options import ClusterOptions
from specdec.cli.cluster_view import ClusterView
from specdec.cli.processes import LocalCluster


async def start_lanes(
    options: ClusterOptions, lanes: Sequence[Lane], view: ClusterView, stack: contextlib.AsyncExitStack
) -> list[LocalCluster]:
    """A cluster for each lane, in their order; the first one's has the verifier. They stop with the stack."""
    clusters: list[LocalCluster] = []
    for index, lane in enumerate(lanes):
        lane_options = dataclasses.replace(
            options,
            proposer=lane.proposer,
            draft_model=lane.draft_model,
            quantization=lane.quantization,
            verifier_endpoint=clusters[0].endpoints["verifier"] if clusters else None,
            log_folder=options.log_folder and options.log_folder / f"lane-{index}",
        ).validated()
        cluster = LocalCluster(lane_options, on_progress=view.progress, on_line=view.log_line)
        view.say(f"starting {lane.label}; logs in {cluster.log_folder}")
        await stack.enter_async_context(cluster)
        clusters.append(cluster)
    return clusters

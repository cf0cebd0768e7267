"""The loaded target: model, tokenizer, engine and the thread that runs them. Importing it imports torch."""

import asyncio
import dataclasses
import time

import structlog

from specdec.config import VerifierSettings
from specdec.decoding.rounds import warm_up
from specdec.messages import ModelInfo, SelfCheck, ServerStatus
from specdec.model.loading import load_model
from specdec.model.tokenizer import TextTokenizer
from verifier_service.admission import EngineLimits
from verifier_service.device_thread import DeviceThread
from verifier_service.engine import Engine
from verifier_service.observer import EngineObserver
from verifier_service.scheduler import SchedulerPolicy

log = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class Target:
    """What the servicer needs once the model is there. The engine is called through `device.submit` alone."""

    info: ModelInfo
    self_check: SelfCheck
    tokenizer: TextTokenizer
    engine: Engine
    device: DeviceThread

    def describe(self, status: ServerStatus) -> ServerStatus:
        """The status with model, self-check and load. Load is read without a lock: a count may be one step old."""
        return dataclasses.replace(status, model=self.info, self_check=self.self_check, load=self.engine.load())


def load_target(settings: VerifierSettings, observer: EngineObserver, loop: asyncio.AbstractEventLoop) -> Target:
    """Loads the model, proves that it is exact, compiles what it needs and starts its engine. Blocks for that long.

    Raises ModelLoadError.
    """
    started_at = time.monotonic()
    model = load_model(
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        cache_dir=settings.cache_dir,
        num_threads=settings.threads,
        kv_budget_bytes=None if settings.kv_cache_mib is None else settings.kv_cache_mib << 20,
    )
    runner, self_check = model.runner, model.prove()
    warm_up(runner.vocabulary_size)
    log.info(
        "loaded",
        model=settings.model,
        elapsed_s=round(time.monotonic() - started_at, 2),
        numerics_fingerprint=runner.numerics.fingerprint,
        weights_dtype=runner.numerics.weights_dtype,
        linear_kernel=runner.numerics.linear_kernel,
        self_check_passed=self_check.passed,
        max_rows=self_check.max_rows,
        num_comparisons=self_check.num_comparisons,
        kv_budget_mib=runner.kv_budget_bytes >> 20,
        num_kv_blocks=runner.pool.num_blocks,
    )
    if not self_check.passed:
        log.warning("logits depend on their batch on this device: output is not bit-exact", detail=self_check.detail)
    policy = SchedulerPolicy(
        max_step_rows=min(settings.max_step_rows or runner.step_rows, runner.max_rows),
        max_draft_tokens=settings.max_draft_tokens,
        draft_wait_s=settings.draft_wait_ms / 1000,
    )
    limits = EngineLimits(
        settings.max_sessions,
        settings.max_waiting_sessions,
        settings.default_max_new_tokens,
        prefix_caching=settings.prefix_caching,
        kept_tokens_grace_s=settings.kept_tokens_grace_s,
        max_attachments_per_stream=settings.max_attachments_per_stream,
    )
    engine = Engine(model.info.name, runner, model.tokenizer, policy, limits, observer, time.monotonic)
    device = DeviceThread(engine.step, loop)
    device.start()
    return Target(model.info, self_check, model.tokenizer, engine, device)

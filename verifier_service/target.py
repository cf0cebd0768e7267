"""The loaded target: model, tokenizer, engine and the thread that runs them."""

import asyncio
import dataclasses
import time
from collections.abc import Callable

from specdec.messages import ModelInfo, SelfCheck, ServerStatus
from specdec.model.loading import LoadedModel
from specdec.model.tokenizer import TextTokenizer
from verifier_service.admission import EngineLimits
from verifier_service.device_thread import DeviceThread
from verifier_service.engine import Engine
from verifier_service.observer import EngineObserver
from verifier_service.scheduler import SchedulerPolicy


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


def start_target(
    model: LoadedModel,
    self_check: SelfCheck,
    policy: SchedulerPolicy,
    limits: EngineLimits,
    observer: EngineObserver,
    loop: asyncio.AbstractEventLoop,
    clock: Callable[[], float] = time.monotonic,
) -> Target:
    """An engine over a loaded model, with its device thread running."""
    engine = Engine(model.info.name, model.runner, model.tokenizer, policy, limits, observer, clock)
    device = DeviceThread(engine.step, loop)
    device.start()
    return Target(model.info, self_check, model.tokenizer, engine, device)

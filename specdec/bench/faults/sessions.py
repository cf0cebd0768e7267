"""The sessions that stream while faults come: each asks its next output when its last one has ended."""

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence

from specdec.bench.faults.requests import CampaignRequest
from specdec.bench.faults.stream import Output, Patience, receive
from specdec.replicas import Replica


class StreamingSessions:
    """`outputs` has all of them, those that still stream too, in the order in which they were asked."""

    def __init__(
        self,
        requests: Sequence[CampaignRequest],
        orchestrators: Mapping[str, Replica],
        num_sessions: int,
        patience: Patience,
    ) -> None:
        self.outputs: list[Output] = []
        self._requests = requests
        self._orchestrators = orchestrators
        self._num_sessions = num_sessions
        self._patience = patience

    @property
    def streaming(self) -> list[Output]:
        return [output for output in self.outputs if output.ended_s is None]

    async def ask_each_once(self) -> None:
        """Every request once."""
        waiting = iter(self._requests)

        async def session(number: int) -> None:
            for request in waiting:
                await self._ask(number, request)

        await self._all(session)

    async def ask_until(self, over: asyncio.Event) -> None:
        """Every session the same requests in turn, until it is over; what has begun is received to its end."""

        async def session(number: int) -> None:
            mine = self._requests[number :: self._num_sessions] or self._requests
            turn = 0
            while not over.is_set():
                await self._ask(number, mine[turn % len(mine)])
                turn += 1

        await self._all(session)

    async def _all(self, session: Callable[[int], Coroutine[None, None, None]]) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(self._num_sessions):
                group.create_task(session(number))

    async def _ask(self, session: int, request: CampaignRequest) -> None:
        """Half of the sessions ask one orchestrator first, half the other."""
        names = list(self._orchestrators)
        output = Output(request.number, _new_id(), time.monotonic(), names[session % len(names)])
        self.outputs.append(output)
        await receive(output, request.spec, self._orchestrators, self._patience, _new_id)


def _new_id() -> str:
    return uuid.uuid4().hex

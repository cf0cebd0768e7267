"""The one thread that owns the device: every command runs, and steps run between them."""

import asyncio
from collections.abc import Callable

from verifier_service.device_thread import DeviceThread
from verifier_service.mailbox import Mailbox

DEADLINE_S = 10.0


async def run(commands: Callable[[DeviceThread], None], done: asyncio.Event, step: Callable[[], float | None]) -> None:
    device = DeviceThread(step, asyncio.get_running_loop())
    commands(device)
    device.start()
    try:
        async with asyncio.timeout(DEADLINE_S):
            await done.wait()
    finally:
        assert await device.stop(DEADLINE_S)


async def test_a_command_that_comes_while_another_runs_is_not_lost():
    done = asyncio.Event()

    def commands(device: DeviceThread) -> None:
        def submit_again(count: int) -> None:
            if count == 0:
                device.post(done.set)
            else:
                device.submit(lambda: submit_again(count - 1))

        device.submit(lambda: submit_again(100))

    await run(commands, done, lambda: None)


async def test_a_flood_of_commands_does_not_keep_the_steps_from_running():
    done = asyncio.Event()
    num_steps = 0
    flooding = True

    def step() -> float:
        nonlocal num_steps, flooding
        num_steps += 1
        if num_steps == 20:
            flooding = False
        return 0.0

    def commands(device: DeviceThread) -> None:
        def flood() -> None:
            if flooding:
                device.submit(flood)
                device.submit(flood) if num_steps < 8 else None
            elif not done.is_set():
                device.post(done.set)

        device.submit(flood)

    await run(commands, done, step)


async def test_a_failed_command_harms_no_other_one():
    done = asyncio.Event()

    def commands(device: DeviceThread) -> None:
        device.submit(lambda: 1 / 0)
        device.submit(lambda: device.post(done.set))

    await run(commands, done, lambda: None)


async def test_items_reach_their_mailbox_in_order():
    done = asyncio.Event()
    mailbox: Mailbox[int] = Mailbox(100)

    def commands(device: DeviceThread) -> None:
        send = device.sink(mailbox)
        for number in range(50):
            device.submit(lambda number=number: send(number))
        device.submit(lambda: device.post(done.set))

    await run(commands, done, lambda: None)
    assert [await mailbox.get() for _ in range(50)] == list(range(50))

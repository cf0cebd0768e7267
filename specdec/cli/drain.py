"""`specdec drain` and `specdec undrain`: take a server out of service without an error at any client, and back."""

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import typer

from specdec.cli.admin_connection import Orchestrator, asks_orchestrator
from specdec.cli.failures import EXIT_FAILED, fail

if TYPE_CHECKING:
    from specdec.cli.admin_client import AdminClient
    from specdec.messages.cluster import ClusterStatus

_LOOK_EVERY_S = 0.5
_ALONE = "other orchestrators do not see this, and it ends with the process at {}"


@asks_orchestrator
def drain(
    orchestrator: Orchestrator,
    target: Annotated[str, typer.Argument(metavar="ENDPOINT", help="What to empty, as `specdec ps` shows it.")],
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Until it has no sessions left.")] = True,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0, help="Seconds to wait.")] = 600.0,
) -> None:
    """Send no new sessions to a server and move those that run elsewhere.

    Where no other server would take them, they run to their end. Of the orchestrator itself: it takes no new streams.
    """

    async def carry_out(client: "AdminClient") -> int | None:
        order = await client.drain(target)
        print(f"{target} gets no new sessions; {_count(order.num_sessions)} there now", flush=True)
        if not order.shared:
            print(_ALONE.format(orchestrator.endpoint), flush=True)
        return await _wait_until_empty(client, target, timeout_s) if wait else 0

    num_left = orchestrator.ask(carry_out)
    if num_left is None:
        fail(f"{target} is not known any more at {orchestrator.endpoint}")
    if num_left:
        fail(f"{_count(num_left)} left at {target} after {timeout_s:.0f} s; it stays drained", EXIT_FAILED)
    if wait:
        print(f"{target} is empty")


@asks_orchestrator
def undrain(
    orchestrator: Orchestrator,
    target: Annotated[str, typer.Argument(metavar="ENDPOINT", help="What to use again.")],
) -> None:
    """Let a server have new sessions again."""

    async def take_back(client: "AdminClient") -> bool:
        return await client.undrain(target)

    shared = orchestrator.ask(take_back)
    print(f"{target} gets new sessions again")
    if not shared:
        print("other orchestrators do not see this")


async def _wait_until_empty(client: "AdminClient", target: str, timeout_s: float) -> int | None:
    """Sessions that are left when the time is up; None where the server is not known any more."""
    deadline = time.monotonic() + timeout_s
    told = -1
    while (num_left := _num_sessions(await client.cluster_status(), target)) is not None:
        if num_left == 0 or time.monotonic() >= deadline:
            return num_left
        if num_left != told:
            print(f"  {_count(num_left)} left", flush=True)
            told = num_left
        await asyncio.sleep(_LOOK_EVERY_S)
    return None


def _num_sessions(status: "ClusterStatus", target: str) -> int | None:
    """Of all orchestrators, as far as the server told; None where it is not known."""
    from specdec.messages.cluster import Role

    for one in status.endpoints:
        if one.endpoint == target:
            load = one.status.load if one.status is not None and one.healthy else None
            if load is None:
                return one.num_own_sessions
            is_drafter = one.role is Role.DRAFTER
            told = load.num_attachments if is_drafter else load.num_active_sessions + load.num_waiting_sessions
            return max(one.num_own_sessions, told)
    return None


def _count(num_sessions: int) -> str:
    return "1 session" if num_sessions == 1 else f"{num_sessions} sessions"

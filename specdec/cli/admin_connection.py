"""How the commands for operators reach an orchestrator: the same options for all of them, once."""

import asyncio
import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from specdec.cli.access import Access, InsecureToken, Tls, TlsCa, Token, TokenFile, read_access
from specdec.cli.failures import UsageError, told_in_one_line
from specdec.cli.generate import DEFAULT_ENDPOINT

if TYPE_CHECKING:
    from specdec.cli.admin_client import AdminClient

Answer = TypeVar("Answer")


@dataclasses.dataclass(frozen=True)
class Orchestrator:
    """The one that is asked, and how it lets us in."""

    endpoint: str
    access: Access

    def ask(self, question: "Callable[[AdminClient], Awaitable[Answer]]") -> Answer:
        """Connects, asks, and closes the connection. Raises UsageError for an endpoint that is none."""
        return asyncio.run(self._ask(question))

    async def _ask(self, question: "Callable[[AdminClient], Awaitable[Answer]]") -> Answer:
        from specdec.cli.admin_client import AdminClient

        try:
            client = AdminClient(self.endpoint, self.access)
        except ValueError as error:
            raise UsageError(f"--endpoint: {error}") from None
        async with client:
            return await question(client)


def asks_orchestrator(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose first parameter is the Orchestrator, as one that has the options of a connection in its place.

    Its faults are told in one line.
    """
    options = list(inspect.signature(_connection, eval_str=True).parameters.values())
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    @functools.wraps(command)
    def with_options(**given: Any) -> None:
        with told_in_one_line():
            orchestrator = _connection(**{option.name: given.pop(option.name) for option in options})
            try:
                command(orchestrator, **given)
                sys.stdout.flush()
            except BrokenPipeError:  # whoever read has seen enough; what is buffered still has to go somewhere
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in sorted([*own, *options], key=lambda one: one.default is not inspect.Parameter.empty)
    ]
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_options


def _connection(
    endpoint: Annotated[
        str, typer.Option(envvar="SPECDEC_ENDPOINT", help="The one orchestrator to ask.")
    ] = DEFAULT_ENDPOINT,
    tls: Tls = None,
    tls_ca: TlsCa = None,
    token: Token = None,
    token_file: TokenFile = None,
    insecure_token: InsecureToken = False,
) -> Orchestrator:
    if "," in endpoint:  # `specdec generate` takes several
        raise UsageError(f"--endpoint: {endpoint} are several, and one is asked")
    access = read_access(
        endpoint, tls=tls, tls_ca=tls_ca, token=token, token_file=token_file, insecure_token=insecure_token
    )
    return Orchestrator(endpoint, access)

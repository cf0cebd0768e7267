"""Where verifiers and drafters are. Knows addresses, not whether anybody answers there."""

import dataclasses
from collections.abc import AsyncIterator
from typing import Protocol


@dataclasses.dataclass(frozen=True)
class Addresses:
    """Every known server, as host:port."""

    verifiers: tuple[str, ...]
    drafters: tuple[str, ...]


class Discovery(Protocol):
    def watch(self) -> AsyncIterator[Addresses]:
        """The addresses now, and again after each change."""


class StaticDiscovery:
    """A list that never changes."""

    def __init__(self, verifiers: tuple[str, ...], drafters: tuple[str, ...]) -> None:
        self._addresses = Addresses(tuple(dict.fromkeys(verifiers)), tuple(dict.fromkeys(drafters)))

    async def watch(self) -> AsyncIterator[Addresses]:
        yield self._addresses

"""How many streams each address has open. Knows addresses as gRPC names them; refuses to know what streams carry."""

import contextlib
from collections import Counter
from collections.abc import Iterator

from specdec.errors import TooManyStreamsError

_RETRY_AFTER_S = 1.0


class StreamCounts:
    """Counts by host: one that opens connection after connection is one host still."""

    def __init__(self, max_streams: int) -> None:
        self._max_streams = max_streams
        self._num_streams: Counter[str] = Counter()

    @contextlib.contextmanager
    def one_more(self, peer: str) -> Iterator[None]:
        """Counts a stream of a peer, named as in "ipv4:10.0.0.1:5000", for as long as it is open.

        Raises TooManyStreamsError where its host has as many as it may have.
        """
        host, _, _ = peer.rpartition(":")
        if self._num_streams[host] >= self._max_streams:
            raise TooManyStreamsError(
                f"at most {self._max_streams} streams from one address", retry_after_s=_RETRY_AFTER_S
            )
        self._num_streams[host] += 1
        try:
            yield
        finally:
            self._num_streams[host] -= 1
            if self._num_streams[host] == 0:
                del self._num_streams[host]

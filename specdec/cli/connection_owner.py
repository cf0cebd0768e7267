"""Which process a TCP connection on loopback comes from, by what /proc tells. Linux alone; elsewhere nobody is found.

Looked up at every connection that is accepted, so it reads the table of connections once, and of each process its open
files and no more.
"""

import os
from collections.abc import Mapping
from pathlib import Path

_PROC = Path("/proc")
_LOOPBACK = "0100007F"
_LOCAL_ADDRESS, _INODE = 1, 9


def owner_of_port(port: int, pids: Mapping[str, int]) -> str | None:
    """The name of the process whose connection has that local port; None where none of them has."""
    inode = _inode_of(port)
    if inode is None:
        return None
    link = f"socket:[{inode}]"
    return next((name for name, pid in pids.items() if link in _open_files(pid)), None)


def _inode_of(port: int) -> str | None:
    address = f"{_LOOPBACK}:{port:04X}"
    try:
        lines = (_PROC / "net" / "tcp").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((fields[_INODE] for line in lines if (fields := line.split())[_LOCAL_ADDRESS] == address), None)


def _open_files(pid: int) -> set[str]:
    links = set()
    try:
        for entry in os.scandir(_PROC / str(pid) / "fd"):
            links.add(os.readlink(entry.path))
    except OSError:  # it ended, or closed one meanwhile
        pass
    return links

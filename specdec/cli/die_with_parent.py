"""Run a command that dies when its parent does: `python die_with_parent.py PARENT_PID COMMAND...`.

A script of its own that becomes the command (exec), so that nothing runs between fork and exec in a process that
has threads. Standard library only: it is run by path, before anything is imported. The kernel ties the child to the
*thread* that started it, so start children from a thread that lives as long as they should. Where there is no such
call (not Linux) the command runs all the same, and only a parent that is killed outright leaves it behind.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # it died before the call: nobody would ever tell
            sys.exit(f"parent {parent_pid} is gone already")
    os.execvp(command[0], command)  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main()

"""A role without a model, for tests of the supervisor: logs what a role logs, then waits for SIGTERM.

`python stand_in_role.py ROLE MODE [options as given]`. Modes: serve; die_early; die_late; deaf (ignores SIGTERM); slow
(never serves); parent (leaves a child of its own behind).
"""

import json
import os
import signal
import subprocess
import sys
import time


def log(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), file=sys.stderr, flush=True)


def main() -> None:
    role, mode = sys.argv[1:3]
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log("starting", arguments=sys.argv[3:])
    if mode == "die_early":
        print("no such model: nonsense", file=sys.stderr, flush=True)
        sys.exit(3)
    if mode == "parent":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    log("listening", endpoint=f"127.0.0.1:{10000 + os.getpid() % 50000}", metrics="127.0.0.1:1")
    if mode != "slow":
        log("serving")
    deadline = time.monotonic() + (0.2 if mode == "die_late" else 600)
    while not stopped and time.monotonic() < deadline:
        time.sleep(0.01)
    log("stopped", role=role)


if __name__ == "__main__":
    main()

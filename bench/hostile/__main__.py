"""Do hostile messages hurt anybody? Many of them to each service, while honest sessions stream.

    python -m bench.hostile --messages 100000 --json out/hostile.json

Exit code 1 where a role died, answered with a fault of its own, or an honest output changed or failed. Roles run
without TLS here, so what only a credential can forbid (to fence a session as its orchestrator, to drain) is not tried.
"""

import argparse
import asyncio
import sys
from pathlib import Path

from bench.hostile.campaign import run
from specdec.bench.machine import describe_commit, describe_machine
from specdec.bench.report_file import write_report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000, help="To each service.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path("out/hostile.json"))
    options = parser.parse_args()
    report = {"commit": describe_commit(Path(__file__).parent), "machine": describe_machine()}
    report |= asyncio.run(run(options.messages, options.seed))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    write_report(options.json, report)
    for name, attack in report["attacks"].items():
        print(f"{name}: {attack['num_sent']} messages in {attack['elapsed_s']:.0f} s, {len(attack['faults'])} faults")
    print(f"honest outputs: {report['honest']}; roles that died: {report['dead'] or 'none'}; {report['rss_mb']}")
    return 0 if report["sound"] else 1


if __name__ == "__main__":
    sys.exit(main())

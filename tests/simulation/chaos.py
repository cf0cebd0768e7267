"""Random schedules for as long as CHAOS_SECONDS says: `make chaos`. Prints seeds and counts, keeps what fails.

CHAOS_SEED repeats the batches from that seed on. Exits with 1 where a schedule failed.
"""

import os
import random
import sys
import time
from pathlib import Path

from hypothesis import HealthCheck, given, seed, settings

from tests.simulation import roles
from tests.simulation.faults import Schedule
from tests.simulation.strategies import schedules
from tests.simulation.world import ViolationError, run_schedule

BATCH = 100
KEPT_AT = Path("out/chaos")
MAX_FAULTS = 14


def run_batch(number: int) -> int:
    """How many schedules were run. Raises ViolationError, with the smallest schedule that shows it."""
    num_run = 0

    @seed(number)
    @settings(
        max_examples=BATCH,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(schedules(max_faults=MAX_FAULTS))
    def run(schedule: Schedule) -> None:
        nonlocal num_run
        num_run += 1
        run_schedule(schedule)

    run()
    return num_run


def main() -> int:
    until = time.monotonic() + float(os.environ.get("CHAOS_SECONDS", "600"))
    number = int(os.environ.get("CHAOS_SEED", random.randrange(1_000_000)))
    num_run = num_failed = 0
    with roles.installed():
        while time.monotonic() < until:
            try:
                num_run += run_batch(number)
            except ViolationError as violation:
                num_failed += 1
                KEPT_AT.mkdir(parents=True, exist_ok=True)
                kept = KEPT_AT / f"{number}.txt"
                kept.write_text(str(violation))
                print(f"seed {number}: {violation}\nkept at {kept}; again: CHAOS_SEED={number} make chaos")
            print(f"seed {number}: {num_run} schedules, {num_failed} seeds with a failure", flush=True)
            number += 1
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())

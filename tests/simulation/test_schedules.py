"""Any faults at any time: what clients are told is a prefix of the undisturbed output, and in the end nothing is left.

The same schedules are drawn at every run; `make chaos` draws others for as long as one likes. A schedule that failed is
printed as it can be put into test_known_schedules.py.
"""

import pytest
from hypothesis import HealthCheck, given, settings

from tests.simulation.faults import Kind, Schedule
from tests.simulation.strategies import schedules
from tests.simulation.world import run_schedule

NUM_OF_ALL_KINDS, NUM_OF_SOME = 400, 200
PROCESS_FAULTS = frozenset({Kind.KILL, Kind.PAUSE, Kind.TERMINATE})
NETWORK_FAULTS = frozenset({Kind.CUT, Kind.CUT_ONE_WAY, Kind.SLOW, Kind.RESET, Kind.DUPLICATE})
STORE_FAULTS = frozenset(
    {
        Kind.STORE_AWAY,
        Kind.STORE_SAVES,
        Kind.STORE_ROLLS_BACK,
        Kind.STORE_EMPTY,
        Kind.STORE_REPLIES_LOST,
        Kind.CLOCK_JUMP,
    }
)
RECONNECTS = frozenset({Kind.CLIENT_RECONNECTS, Kind.CLIENT_FORGETS})


def fixed(num_schedules: int) -> settings:
    return settings(
        max_examples=num_schedules,
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("simulation")]


@fixed(NUM_OF_ALL_KINDS)
@given(schedules())
def test_faults_of_any_kind(schedule: Schedule) -> None:
    run_schedule(schedule)


@fixed(NUM_OF_SOME)
@given(schedules(PROCESS_FAULTS))
def test_processes_that_die_stand_still_or_are_told_to_end(schedule: Schedule) -> None:
    run_schedule(schedule)


@fixed(NUM_OF_SOME)
@given(schedules(NETWORK_FAULTS | RECONNECTS))
def test_links_that_are_cut_slow_or_reset(schedule: Schedule) -> None:
    run_schedule(schedule)


@fixed(NUM_OF_SOME)
@given(schedules(STORE_FAULTS | RECONNECTS | {Kind.KILL}))
def test_a_store_that_forgets_while_owners_change(schedule: Schedule) -> None:
    run_schedule(schedule)

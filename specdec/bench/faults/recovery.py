"""How long clients waited because of a fault. Pure."""

import itertools

from specdec.bench.faults.records import FaultRecord
from specdec.bench.faults.stream import Output


def recovery_times_s(fault: FaultRecord) -> list[float]:
    """For each output that it affected and that went on: from the fault to the next token."""
    pauses = (pause_s(output, fault.began_s, fault.struck_until_s) for output in fault.affected)
    return [pause for pause in pauses if pause is not None]


def pause_s(output: Output, began_s: float, struck_until_s: float) -> float | None:
    """The longest time without a token that began before `struck_until_s` and ended after `began_s`, counted from the
    fault on; what was on its way already ends no pause. None: no token came after the fault, so the output had ended,
    or was given up, which is counted elsewhere."""
    arrivals_s = [output.asked_s, *(at_s for at_s, _ in output.arrivals)]
    pauses = [
        after_s - max(before_s, began_s)
        for before_s, after_s in itertools.pairwise(arrivals_s)
        if after_s > began_s and before_s < struck_until_s
    ]
    return max(pauses, default=None)

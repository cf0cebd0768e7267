import os
import random

from specdec.bench.faults.growth import Growth, Sample, growth_of, median_slope
from specdec.bench.faults.mixed_load import Ending, draw_request
from specdec.bench.faults.process_usage import take_sample
from specdec.bench.faults.records import LeftOver
from specdec.bench.faults.soak_report import build_soak_report

MIB = 1 << 20


def samples(rss_mib: list[float], num_fds: int = 20) -> list[Sample]:
    """Ten seconds apart."""
    return [Sample(10.0 * index, int(rss * MIB), num_fds, 8) for index, rss in enumerate(rss_mib)]


def rss_growth(rss_mib: list[float]) -> Growth:
    return next(one for one in growth_of(samples(rss_mib)) if one.measure == "rss_bytes")


def test_a_process_that_fills_its_caches_and_then_rests_is_flat() -> None:
    growth = rss_growth([10.0 * index for index in range(20)] + [200.0] * 20)
    assert growth.flat
    assert growth.growth == 0


def test_a_steady_leak_is_not_flat() -> None:
    growth = rss_growth([200.0 + index for index in range(40)])
    assert not growth.flat
    assert round(growth.per_hour / MIB) == 360


def test_one_odd_sample_is_no_growth() -> None:
    assert rss_growth([200.0] * 38 + [900.0, 200.0]).flat


def test_the_median_slope_of_a_line_is_its_own() -> None:
    assert median_slope([(0.0, 1.0), (2.0, 5.0), (4.0, 9.0)]) == 2.0


def test_a_process_that_grows_and_is_judged_makes_the_report_say_so() -> None:
    taken = {"verifier-0": samples([200.0] * 20), "client": samples([200.0 + index for index in range(20)])}
    assert build_soak_report(taken, {}, [], LeftOver(), not_judged="client")["flat"]
    report = build_soak_report(taken, {}, ["INTERNAL: x"], LeftOver(), not_judged="")
    assert report["grown"] == ["client rss_bytes"]
    assert not report["clean"]


def test_a_sample_of_this_process_tells_what_it_holds() -> None:
    sample = take_sample(os.getpid())
    assert sample is not None
    assert sample.num_threads >= 1
    assert sample.rss_bytes >= (sample.arena_bytes or 0) > 0
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(5)]
    more = take_sample(os.getpid())
    for each in held:
        os.close(each)
    assert more is not None
    assert more.num_fds == sample.num_fds + 5


def test_the_mixed_load_has_every_way_to_end_and_every_kind_of_request() -> None:
    chance = random.Random(0)
    requests = [draw_request(chance) for _ in range(200)]
    assert {request.ending for request in requests} == set(Ending)
    assert {request.spec.num_samples for request in requests} == {1, 2, 3}
    assert {request.spec.num_logprobs for request in requests} == {None, 0, 3}
    assert {len(request.spec.stop.stop_strings) for request in requests} == {0, 2}
    for request in requests:
        request.spec.validated()

import pytest

from specdec.errors import ModelLoadError
from specdec.model.synthetic_options import ForwardTimes, SyntheticOptions, is_synthetic, parse_synthetic


def test_nothing_asked_for_is_the_defaults() -> None:
    assert parse_synthetic("synthetic:") == SyntheticOptions()


def test_every_option_is_read() -> None:
    options = parse_synthetic(
        "synthetic:seed=7,vocabulary=1000,context=512,forward_ms=30,row_ms=0.05,acceptance=0.8,end_rate=0.01"
    )
    assert options == SyntheticOptions(
        seed=7,
        vocabulary_size=1000,
        context_limit=512,
        times=ForwardTimes(((1, 0.03),), 0.00005),
        acceptance=0.8,
        end_rate=0.01,
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("seed", "'seed' is not an option"),
        ("sed=1", "'sed=1' is not an option"),
        ("seed=1,seed=2", "seed is given twice"),
        ("seed=-1", "seed=-1: want a whole number"),
        ("seed=1.5", "seed=1.5: want a whole number"),
        ("vocabulary=511", "vocabulary=511: want a whole number in [512, "),
        ("context=15", "context=15: want"),
        ("acceptance=1.01", "acceptance=1.01: want a number in [0, 1]"),
        ("acceptance=nan", "acceptance=nan: want"),
        ("end_rate=x", "end_rate=x: want"),
        ("forward_ms=-1", "forward_ms=-1: want"),
        ("forward_ms=inf", "forward_ms=inf: want"),
        ("forward_ms=1:30/1:40", "ascending rows"),
        ("forward_ms=1:30/", "want a whole number"),
        ("forward_ms=0:30", "want a whole number"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(ModelLoadError) as refusal:
        parse_synthetic(f"synthetic:{text}")
    assert named in refusal.value.message


def test_only_names_with_the_prefix_are_synthetic() -> None:
    assert is_synthetic("synthetic:seed=1")
    assert not is_synthetic("synthetic")
    assert not is_synthetic("smollm2-135m")


def test_times_lie_on_lines_between_the_points_and_rows_cost_on_top() -> None:
    times = parse_synthetic("synthetic:forward_ms=2:10/4:20/8:20,row_ms=1").times
    expected_ms = {1: 11, 2: 12, 3: 18, 4: 24, 6: 26, 8: 28, 100: 120}
    assert {rows: round(1000 * times.expected_s(rows), 6) for rows in expected_ms} == expected_ms


def test_beyond_the_last_point_the_last_slope_goes_on() -> None:
    times = parse_synthetic("synthetic:forward_ms=1:10/11:20").times
    assert times.expected_s(21) == pytest.approx(0.030)

"""Speed and acceptance of servers, in a time that the tests tell."""

import pytest

from orchestrator.endpoint_figures import EndpointFigures, Figures
from specdec.messages import Delta, RoundStatistics


def delta(num_tokens: int, *, num_draft_tokens: int = 0, num_accepted_tokens: int = 0) -> Delta:
    statistics = RoundStatistics(num_draft_tokens, num_accepted_tokens, None, 0.0, 0.0, 0.0)
    return Delta("", tuple(range(num_tokens)), 0, statistics)


def test_tokens_count_for_verifier_and_drafter_and_for_nobody_else() -> None:
    figures = EndpointFigures()
    for second in range(5):
        figures.note(delta(4, num_draft_tokens=4, num_accepted_tokens=3), ("v", "d"), 100.0 + second)
        figures.note(delta(2), ("w", ""), 100.0 + second)
    assert figures.of("v", 105.0) == Figures(4.0, 0.75)
    assert figures.of("d", 105.0) == Figures(4.0, 0.75)
    assert figures.of("w", 105.0) == Figures(2.0, None)
    assert figures.of("unknown", 105.0) == Figures()
    assert len(figures) == 3


def test_what_is_long_past_no_longer_counts() -> None:
    figures = EndpointFigures()
    figures.note(delta(1000), ("v",), 100.0)
    assert figures.of("v", 105.0).tokens_per_s == pytest.approx(200.0)
    assert figures.of("v", 111.0) == Figures()


def test_a_first_moment_is_not_taken_for_a_torrent() -> None:
    figures = EndpointFigures()
    figures.note(delta(7), ("v",), 100.01)
    assert figures.of("v", 100.02).tokens_per_s == 7.0


def test_endpoints_that_were_silent_longest_are_forgotten_first() -> None:
    figures = EndpointFigures(max_endpoints=2)
    figures.note(delta(1), ("a",), 100.0)
    figures.note(delta(1), ("b",), 100.0)
    figures.note(delta(1), ("a",), 101.0)
    figures.note(delta(1), ("c",), 101.0)
    assert len(figures) == 2
    assert figures.of("b", 101.0) == Figures()
    assert figures.of("a", 101.0).tokens_per_s > 0

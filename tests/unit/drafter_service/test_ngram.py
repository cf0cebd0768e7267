"""Prompt lookup."""

from hypothesis import given
from hypothesis import strategies as st

from drafter_service.proposers.ngram import MAX_CANDIDATES, NgramIndex, NgramProposer, NgramSession
from specdec.params import AcceptanceRule, SamplingParams

small_texts = st.lists(st.integers(0, 3), min_size=1, max_size=80)


def new_session(rule: AcceptanceRule = AcceptanceRule.GREEDY) -> NgramSession:
    return NgramProposer().new_session(SamplingParams(), rule, prompt_length=0, seed=None, sample_index=0)


def test_what_followed_the_longest_match_is_proposed() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 4, 5, 99, 98, 2, 3, 4, 5]
    assert new_session().propose(text, 3).token_ids == (6, 7, 8)  # four tokens agree; (4, 5) alone was seen later


def test_the_most_recent_of_equal_matches_is_taken() -> None:
    text = [1, 2, 7, 0, 1, 2, 8, 0, 1, 2]
    assert new_session().propose(text, 1).token_ids == (8,)


def test_a_repetition_goes_on_beyond_the_end_of_the_text() -> None:
    assert new_session().propose([1, 2, 3] * 5, 7).token_ids == (1, 2, 3, 1, 2, 3, 1)


def test_nothing_is_proposed_where_nothing_stood_before() -> None:
    assert new_session().propose([1, 2, 3, 4, 5], 8).token_ids == ()


def test_a_longer_match_gives_a_longer_guess() -> None:
    filler = list(range(100, 160))
    short = new_session().propose([1, 2, *filler, 1, 2], 50)
    long = new_session().propose([*range(1, 30), *filler, *range(1, 30)], 50)
    assert 0 < len(short.token_ids) < len(long.token_ids)


def test_rejections_shorten_guesses_down_to_nothing_and_acceptance_brings_them_back() -> None:
    session = new_session()
    text = [1, 2, *range(100, 160), 1, 2]
    before = len(session.propose(text, 20).token_ids)
    for _ in range(60):
        session.observe(len(session.propose(text, 20).token_ids), 0)
    assert len(session.propose(text, 20).token_ids) < before
    assert session.propose(text, 20).token_ids == ()


def test_accepted_guesses_grow() -> None:
    session = new_session()
    text = [1, 2, *range(100, 160), 1, 2]
    before = len(session.propose(text, 40).token_ids)
    for _ in range(20):
        num_tokens = len(session.propose(text, 40).token_ids)
        session.observe(num_tokens, num_tokens)
    assert len(session.propose(text, 40).token_ids) > before


@given(small_texts, st.integers(0, 12))
def test_a_guess_is_what_followed_an_earlier_occurrence_of_the_last_tokens(text: list[int], max_tokens: int) -> None:
    proposal = new_session().propose(text, max_tokens)
    guessed = list(proposal.token_ids)
    assert len(guessed) <= max_tokens
    assert len(proposal.reach_probs) == len(guessed)
    assert list(proposal.reach_probs) == sorted(proposal.reach_probs, reverse=True)
    if guessed:
        joined = text + guessed
        assert any(
            text[end - 2 : end] == text[-2:] and joined[end : end + len(guessed)] == guessed
            for end in range(2, len(text))
        )


@given(small_texts)
def test_the_match_is_as_long_as_a_search_through_the_whole_text_finds(text: list[int]) -> None:
    index = NgramIndex()
    index.extend_to(text)
    _, length = index.longest_match()
    longest = max(
        (n for n in range(2, len(text)) for end in range(n, len(text)) if text[end - n : end] == text[len(text) - n :]),
        default=0,
    )
    # Only so many recent occurrences of an n-gram are looked at.
    assert min(longest, 48) == length or len(text) > MAX_CANDIDATES


@given(st.lists(small_texts, min_size=1, max_size=6))
def test_guesses_equal_those_of_a_fresh_session_after_any_history(texts: list[list[int]]) -> None:
    session = new_session()
    for text in texts:  # each may continue the one before or not
        proposal = session.propose(text, 8)
        assert proposal == new_session().propose(text, 8)


@given(small_texts, st.lists(st.integers(1, 5), max_size=10))
def test_a_text_that_grows_in_steps_is_indexed_like_one_given_at_once(text: list[int], steps: list[int]) -> None:
    grown, at_once = NgramIndex(), NgramIndex()
    length = 0
    for step in steps:
        length = min(len(text), length + step)
        grown.extend_to(text[:length])
    grown.extend_to(text)
    at_once.extend_to(text)
    assert grown.longest_match() == at_once.longest_match()


def test_under_rejection_each_guess_carries_the_distribution_that_is_certain_of_it() -> None:
    proposal = new_session(AcceptanceRule.REJECTION).propose([1, 2, 3] * 4, 3)
    assert [tuple(d.token_ids) for d in proposal.draft_probs] == [(t,) for t in proposal.token_ids]
    assert all(tuple(d.probs) == (1.0,) for d in proposal.draft_probs)

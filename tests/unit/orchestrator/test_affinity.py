"""Which verifier is taken to have a prompt's blocks."""

import pytest

from orchestrator.affinity import PrefixAffinity, PromptMarks
from specdec.params import ChatMessage, Prompt

HERE = {"a:1": 1, "b:1": 1}
SYSTEM = "You answer in verse. " * 100  # 2,100 characters


def affinity(capacity: int = 1000) -> PrefixAffinity:
    return PrefixAffinity(capacity=capacity, lifetime_s=60.0)


def cached(known: PrefixAffinity, prompt: Prompt, *, tenant: str = "", now: float = 1.0) -> dict[str, int]:
    return known.cached_tokens(known.marks(prompt, tenant, "m"), HERE, now)


def test_a_prompt_that_begins_alike_is_found_where_the_first_went_and_as_far_as_it_is_alike() -> None:
    known = affinity()
    known.note(known.marks(SYSTEM + "Who was Sappho?" * 40, "", "m"), "a:1", 1, 0.0)
    shared = cached(known, SYSTEM + "And Catullus?" * 40)["a:1"]
    assert 0.85 * 2100 / 4 < shared <= 2100 / 4, "to an eighth of its length"
    assert cached(known, "Another beginning. " + SYSTEM) == {}


def test_of_several_verifiers_each_counts_with_the_longest_beginning_that_it_has() -> None:
    known = affinity()
    known.note(known.marks(SYSTEM, "", "m"), "a:1", 1, 0.0)
    known.note(known.marks(SYSTEM[:1000] + "x" * 1000, "", "m"), "b:1", 1, 0.0)
    found = cached(known, SYSTEM)
    assert found["a:1"] > found["b:1"] > 0


def test_tenants_and_models_share_nothing() -> None:
    known = affinity()
    known.note(known.marks(SYSTEM, "one", "m"), "a:1", 1, 0.0)
    assert cached(known, SYSTEM, tenant="one") != {}
    assert cached(known, SYSTEM, tenant="two") == {}
    assert known.cached_tokens(known.marks(SYSTEM, "one", "other"), HERE, 1.0) == {}


@pytest.mark.parametrize(
    ("first", "second", "alike"),
    [
        ((ChatMessage("user", SYSTEM),), (ChatMessage("user", SYSTEM), ChatMessage("user", "more")), True),
        ((ChatMessage("user", SYSTEM),), (ChatMessage("system", SYSTEM),), False),
        (tuple(range(500)), tuple(range(600)), True),
        (tuple(range(500)), tuple(range(1, 501)), False),
        ("\ud800" * 200, "\ud800" * 300, True),
    ],
)
def test_conversations_and_token_ids_are_compared_as_they_came(first: Prompt, second: Prompt, alike: bool) -> None:
    known = affinity()
    known.note(known.marks(first, "", "m"), "a:1", 1, 0.0)
    assert (cached(known, second) != {}) is alike


def test_a_verifier_that_started_anew_or_was_not_asked_for_long_has_nothing() -> None:
    known = affinity()
    marks = known.marks(SYSTEM, "", "m")
    known.note(marks, "a:1", 1, 0.0)
    assert known.cached_tokens(marks, {"a:1": 2}, 1.0) == {}
    assert known.cached_tokens(marks, {}, 1.0) == {}
    assert cached(known, SYSTEM, now=60.0) == {}


def test_it_is_bounded_and_forgets_what_was_used_least_recently_whole_prompts_before_their_beginnings() -> None:
    known = affinity(capacity=40)
    known.note(known.marks(SYSTEM, "", "m"), "a:1", 1, 0.0)
    for number in range(20):
        known.note(known.marks(SYSTEM[:600] + f"{number}" * 2000, "", "m"), "a:1", 1, 0.0)
    assert len(known) == 40
    assert 0 < cached(known, SYSTEM)["a:1"] <= 150, "what the others shared with it stayed, its own end did not"


def test_no_prompt_is_kept_and_long_ones_have_few_hashes() -> None:
    known = affinity()
    marks = known.marks("secret " * 150_000, "", "m")
    assert len(marks.beginnings) < 90
    assert all(len(beginning) == 8 for beginning, _ in marks.beginnings)
    assert known.marks("short", "", "m") == PromptMarks((), 2)


def test_orchestrators_name_prompts_that_begin_alike_the_same_and_short_ones_not_at_all() -> None:
    one, other = affinity(), affinity()
    assert one.marks(SYSTEM + "a" * 500, "", "m").name == other.marks(SYSTEM + "b" * 500, "", "m").name != ""
    assert one.marks(SYSTEM, "", "m").name != one.marks(SYSTEM, "tenant", "m").name
    assert one.marks(SYSTEM[:400], "", "m").name == ""

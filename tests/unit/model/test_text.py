"""Incremental text against decoding everything at once, with transformers' own decoder as the judge."""

import functools
import itertools

from hypothesis import given
from hypothesis import strategies as st

from specdec.model.text import OutputText
from specdec.model.tokenizer import TextTokenizer
from tests.unit.model.tiny import tiny_tokenizer


@functools.cache
def tokenizer() -> TextTokenizer:
    return TextTokenizer(tiny_tokenizer())


def decode_at_once(token_ids: list[int]) -> str:
    return tiny_backend().decode(token_ids, skip_special_tokens=True)


@functools.cache
def tiny_backend():  # type: ignore[no-untyped-def]
    return tiny_tokenizer().backend_tokenizer


def cut_at_stop(text: str, stops: list[str]) -> tuple[str, int | None]:
    """The text before the first completed stop string, and where it was completed."""
    for end in range(1, len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            return text[: end - max(map(len, completed))], end
    return text, None


any_tokens = st.lists(st.integers(0, 319), max_size=40)
some_text = st.text(alphabet="ab c€🙂é", max_size=20)
text_tokens = some_text.map(lambda text: tiny_backend().encode(text).ids)
stop_strings = st.lists(st.text(alphabet="ab c€🙂é", min_size=1, max_size=4), max_size=4)


@st.composite
def tokens_in_chunks(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    token_ids = draw(st.one_of(any_tokens, text_tokens))
    cuts = sorted(draw(st.lists(st.integers(0, len(token_ids)), max_size=8)))
    bounds = [0, *cuts, len(token_ids)]
    return token_ids, [token_ids[start:end] for start, end in itertools.pairwise(bounds)]


def tokens_of(text: str) -> list[int]:
    return list(tiny_backend().encode(text).ids)


@given(tokens_in_chunks())
def test_pieces_together_are_what_decoding_at_once_gives(tokens: tuple[list[int], list[list[int]]]) -> None:
    token_ids, chunks = tokens
    output = OutputText(tokenizer())
    steps = [output.push(chunk) for chunk in chunks]
    assert "".join(step.text for step in steps) + output.flush() == decode_at_once(token_ids)
    assert [step.num_tokens_used for step in steps] == [len(chunk) for chunk in chunks]
    assert tokenizer().decode(token_ids) == decode_at_once(token_ids)


@given(tokens_in_chunks(), stop_strings)
def test_text_ends_before_the_first_completed_stop_string_however_tokens_come(
    tokens: tuple[list[int], list[list[int]]], stops: list[str]
) -> None:
    token_ids, chunks = tokens
    expected, end = cut_at_stop(decode_at_once(token_ids), stops)
    output = OutputText(tokenizer(), stops)
    text, num_used, stopped = "", 0, False
    for chunk in chunks:
        step = output.push(chunk)
        text += step.text
        num_used += step.num_tokens_used
        stopped = step.stopped
        assert expected.startswith(text)
    assert text + output.flush() == expected
    if stopped:
        # the text of the tokens used completes the stop string, that of one token fewer does not
        assert cut_at_stop(decode_at_once(token_ids[:num_used]), stops)[1] == end
        assert cut_at_stop(certain_text(token_ids[: num_used - 1]), stops)[1] is None
    else:
        assert num_used == len(token_ids)
        assert cut_at_stop(certain_text(token_ids), stops)[1] is None


def certain_text(token_ids: list[int]) -> str:
    return OutputText(tokenizer()).push(token_ids).text


@given(text_tokens, stop_strings)
def test_no_more_text_is_held_back_than_a_stop_string_or_a_character_needs(
    token_ids: list[int], stops: list[str]
) -> None:
    output = OutputText(tokenizer(), stops)
    given_text = ""
    for num_tokens, token_id in enumerate(token_ids, start=1):
        step = output.push([token_id])
        given_text += step.text
        if step.stopped:
            return
        certain = certain_text(token_ids[:num_tokens])
        held_back = certain[len(given_text) :]
        needed = max((n for stop in stops for n in range(1, len(stop)) if certain.endswith(stop[:n])), default=0)
        assert len(held_back) == needed


def test_a_character_split_over_tokens_appears_whole_with_its_last_token() -> None:
    smile = tokens_of("🙂")
    assert len(smile) == 4
    output = OutputText(tokenizer())
    assert [output.push([token_id]).text for token_id in smile] == ["", "", "", "🙂"]


def test_an_unfinished_character_is_flushed_as_one_replacement() -> None:
    output = OutputText(tokenizer())
    assert output.push(tokens_of("a🙂")[:-1]).text == "a"
    assert output.flush() == "\N{REPLACEMENT CHARACTER}"


def test_a_stop_string_across_token_borders_names_the_token_that_completes_it() -> None:
    output = OutputText(tokenizer(), ["</s>"])
    step = output.push([*tokens_of("yes</"), *tokens_of("s>"), *tokens_of("more")])
    assert (step.text, step.stopped) == ("yes", True)
    assert step.num_tokens_used == len(tokens_of("yes</")) + len(tokens_of("s>"))
    assert output.push(tokens_of("more")).num_tokens_used == 0
    assert output.flush() == ""


def test_of_a_stop_string_and_its_prefix_the_prefix_stops_first() -> None:
    step = OutputText(tokenizer(), ["END OF TEXT", "END"]).push(tokens_of("the END OF TEXT"))
    assert (step.text, step.stopped) == ("the ", True)


def test_of_stop_strings_completed_at_once_the_longest_is_cut() -> None:
    step = OutputText(tokenizer(), ["b", "aab"]).push(tokens_of("xaaab"))
    assert (step.text, step.stopped) == ("xa", True)


def test_a_held_back_prefix_that_comes_to_nothing_is_given_back() -> None:
    output = OutputText(tokenizer(), ["\n\nQ:"])
    assert output.push(tokens_of("A\n\n")).text == "A"
    assert output.push(tokens_of("\nB")).text == "\n\n\nB"


def test_special_tokens_add_no_text_and_do_not_break_a_stop_string() -> None:
    end = 2
    step = OutputText(tokenizer(), ["ab"]).push([*tokens_of("xa"), end, *tokens_of("b")])
    assert (step.text, step.stopped) == ("x", True)


def test_padding_ids_add_no_text() -> None:
    assert OutputText(tokenizer()).push([*tokens_of("a"), 327, *tokens_of("b")]).text == "ab"

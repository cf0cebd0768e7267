import pytest

from specdec.cli.draft_marks import Origin, split_by_origin
from specdec.cli.terminal_text import printable
from specdec.params import NextTokenKind
from tests.unit.cli.frames import delta


@pytest.mark.parametrize(
    ("kind", "origin"), [(NextTokenKind.RECOVERED, Origin.RECOVERED), (NextTokenKind.BONUS, Origin.BONUS)]
)
def test_accepted_tokens_stand_first_and_the_next_token_last(kind: NextTokenKind, origin: Origin) -> None:
    assert split_by_origin(delta(["a", "b", "c"], 2, kind)) == [("ab", Origin.ACCEPTED), ("c", origin)]


def test_a_plain_step_has_one_plain_token() -> None:
    assert split_by_origin(delta(["a"], 0, NextTokenKind.PLAIN)) == [("a", Origin.PLAIN)]


def test_an_output_that_ends_at_an_accepted_token_is_all_accepted() -> None:
    assert split_by_origin(delta(["a", "b"], 2, None)) == [("ab", Origin.ACCEPTED)]


def test_text_that_is_held_back_takes_no_mark() -> None:
    assert split_by_origin(delta(["a", "", ""], 2, NextTokenKind.BONUS)) == [("a", Origin.ACCEPTED)]


def test_nothing_is_marked_where_the_server_does_not_tell_the_text_of_each_token() -> None:
    assert split_by_origin(delta(["a", "b"], 1, NextTokenKind.BONUS, with_texts=False)) == [("ab", None)]


def test_the_parts_are_the_text() -> None:
    whole = delta(["a", "b", "", "é"], 2, NextTokenKind.RECOVERED)
    assert "".join(text for text, _ in split_by_origin(whole)) == whole.text


def test_escape_sequences_of_a_model_reach_no_terminal() -> None:
    assert printable("\x1b[2Jhi\r\n\tä\x9b") == "\\x1b[2Jhi\\x0d\n\tä\\x9b"

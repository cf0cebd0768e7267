"""The common prefix of what is cached and what is committed."""

from hypothesis import given
from hypothesis import strategies as st

from specdec.ids import common_prefix_length

texts = st.lists(st.integers(0, 2), max_size=12)


@given(texts, texts)
def test_it_is_the_longest_that_both_share_whatever_kind_of_sequence_they_are(
    left: list[int], right: list[int]
) -> None:
    length = common_prefix_length(left, tuple(right))
    assert left[:length] == right[:length]
    assert length in (len(left), len(right)) or left[length] != right[length]
    assert length == common_prefix_length(tuple(right), left)

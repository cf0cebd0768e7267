"""A history counts what it is told, token by token, and never before it is asked."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.decoding.history import TokenHistory

token_lists = st.lists(st.integers(0, 700), max_size=600)


@given(prompt=token_lists, output=token_lists, appended=st.lists(token_lists, max_size=4), asks=st.booleans())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_history_holds_every_token_of_prompt_and_output_with_its_count_in_the_output(prompt, output, appended, asks):
    history = TokenHistory(prompt, output)
    whole = list(output)
    for tokens in appended:
        if asks:
            history.seen()
        history.append(tokens)
        whole += tokens
    token_ids, counts = history.seen()
    expected = Counter(whole)
    assert len(set(token_ids.tolist())) == len(token_ids)
    assert set(token_ids.tolist()) == set(prompt) | set(whole)
    assert dict(zip(token_ids.tolist(), counts.tolist(), strict=True)) == {t: expected[t] for t in token_ids.tolist()}
    assert history.num_output_tokens == len(whole)
    assert [history.count(token_id) for token_id in range(702)] == [expected[token_id] for token_id in range(702)]


def test_the_lists_that_were_handed_over_stay_as_they_were():
    prompt, output = [1, 2], [3]
    history = TokenHistory(prompt, output)
    history.append([4])
    history.seen()
    assert (prompt, output) == ([1, 2], [3])

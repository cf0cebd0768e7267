import pytest

from specdec.model.row_counts import RowCounts


def test_every_count_is_allowed_until_the_safe_ones_are_known() -> None:
    counts = RowCounts(max_rows=8)
    assert [counts.padded(rows) for rows in range(1, 9)] == list(range(1, 9))


def test_rows_are_padded_up_to_the_next_safe_count_and_split_at_the_largest() -> None:
    counts = RowCounts(max_rows=8)
    counts.use([3, 6, 8])
    assert [counts.padded(rows) for rows in (0, 1, 3, 4, 7, 8)] == [0, 3, 3, 6, 8, 8]
    assert [counts.padded(rows) for rows in (9, 16, 22)] == [8 + 3, 16, 16 + 6]


def test_no_counts_and_counts_below_one_are_refused() -> None:
    counts = RowCounts(max_rows=8)
    with pytest.raises(ValueError, match="positive"):
        counts.use([])
    with pytest.raises(ValueError, match="positive"):
        counts.use([0, 3])

"""Tables for a terminal and for a pipe: whole cells, as wide as they need to be; on a narrow terminal fewer columns.
Knows no meaning of a cell."""

import shutil
import sys
from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from specdec.cli.terminal_text import printable

Row = Sequence[str]
_GAP = "  "


class Columns(NamedTuple):
    """What stands where. `right`: headings whose cells are flush right; `least`: those that a narrow terminal goes
    without, the least needed one first."""

    headings: Row
    right: frozenset[str]
    least: Row = ()

    def shown(self, rows: Sequence[Row], width: int | None) -> list[int]:
        """Numbers of the columns that fit together; None: any width does. Those that are not in `least` always stay."""
        numbers = list(range(len(self.headings)))
        leaving = [self.headings.index(heading) for heading in self.least]
        while leaving and width is not None and self._width(rows, numbers) > width:
            numbers.remove(leaving.pop(0))
        return numbers

    def _width(self, rows: Sequence[Row], numbers: Sequence[int]) -> int:
        widest = (max(len(printable(row[number])) for row in (self.headings, *rows)) for number in numbers)
        return sum(widest) + len(_GAP) * (len(numbers) - 1)


def terminal_width() -> int | None:
    """Of stdout in columns; None where it is no terminal, and nothing has to be left out."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def as_lines(columns: Columns, rows: Sequence[Row], width: int | None = None) -> list[str]:
    """Plain text."""
    numbers = columns.shown(rows, width)
    cells = [[printable(row[number]) for number in numbers] for row in (columns.headings, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    flush_right = [columns.headings[number] in columns.right for number in numbers]
    return [
        _GAP.join(
            cell.rjust(widest) if is_right else cell.ljust(widest)
            for cell, widest, is_right in zip(row, widths, flush_right, strict=True)
        ).rstrip()
        for row in cells
    ]


def as_table(
    columns: Columns, rows: Sequence[Row], *, width: int | None = None, styles: Sequence[str | None] = ()
) -> Table:
    """For rich; `styles`: of each row."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, len(_GAP), 0, 0))
    numbers = columns.shown(rows, width)
    for number in numbers:
        heading = columns.headings[number]
        table.add_column(heading, justify="right" if heading in columns.right else "left", no_wrap=True)
    for row, style in zip(rows, styles or [None] * len(rows), strict=True):
        table.add_row(*(Text(printable(row[number])) for number in numbers), style=style)
    return table

"""Tables for a terminal and for a pipe: the same cells, as wide as they need to be. Knows no meaning of a cell."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from specdec.cli.terminal_text import printable

Row = Sequence[str]
_GAP = "  "


def as_lines(headings: Row, rows: Sequence[Row], *, right: Sequence[int] = ()) -> list[str]:
    """Plain text; `right`: the numbers of the columns that are flush right."""
    cells = [[printable(cell) for cell in row] for row in (headings, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    return [
        _GAP.join(
            cell.rjust(widths[column]) if column in right else cell.ljust(widths[column])
            for column, cell in enumerate(row)
        ).rstrip()
        for row in cells
    ]


def as_table(
    headings: Row, rows: Sequence[Row], *, right: Sequence[int] = (), styles: Sequence[str | None] = ()
) -> Table:
    """For rich; `styles`: of each row."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, len(_GAP), 0, 0))
    for column, heading in enumerate(headings):
        table.add_column(heading, justify="right" if column in right else "left", no_wrap=True)
    for number, row in enumerate(rows):
        style = styles[number] if number < len(styles) else None
        table.add_row(*(Text(printable(cell)) for cell in row), style=style)
    return table

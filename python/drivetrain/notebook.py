"""Formats the tables of reports and plans: as HTML for notebooks (`_repr_html_`), and as plain text."""

from collections.abc import Sequence
from html import escape


def html_table(
    lines: Sequence[str],
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    has_text_at_the_end: bool = False,
) -> str:
    """Formats lines of text and a table below them. The first column is left-aligned text, the others are numbers.

    Args:
        lines: Text above the table; it is escaped.
        header: Names of the columns; they are escaped.
        rows: Cells of each row, as many as `header` has names; they are escaped.
        has_text_at_the_end: True if the last column is text too.

    Returns:
        HTML with one paragraph and one table.
    """
    text_columns = {0, len(header) - 1} if has_text_at_the_end else {0}

    def cells(tag: str, values: Sequence[str]) -> str:
        aligned = ("left" if column in text_columns else "right" for column in range(len(values)))
        return "".join(
            f'<{tag} style="text-align: {align}">{escape(value)}</{tag}>'
            for align, value in zip(aligned, values, strict=True)
        )

    text = "<br>".join(map(escape, lines))
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<p>{text}</p><table><thead><tr>{cells('th', header)}</tr></thead><tbody>{body}</tbody></table>"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table as plain text: the first column to the left, the others to the right."""
    table = [tuple(header), *map(tuple, rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    lines = []
    for row in table:
        first, *others = row
        cells = [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)

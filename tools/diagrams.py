"""Draws the diagrams of docs/architecture.md as SVG, readable on light and dark pages: python tools/diagrams.py"""

from __future__ import annotations

import textwrap
from pathlib import Path
from xml.sax.saxutils import escape

IMAGES = Path(__file__).parents[1] / "docs" / "images"
STYLE = """
text { font: 13px sans-serif; fill: #1b1f24; }
.paper { fill: #ffffff; } .box { fill: #e8eaf6; stroke: #3f51b5; } .line { stroke: #57606a; fill: none; }
.head { fill: #57606a; } .name { font-weight: bold; } .middle { text-anchor: middle; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e9ef; }
  .paper { fill: #1e2129; } .box { fill: #2c3150; stroke: #7986cb; } .line { stroke: #9aa4b2; } .head { fill: #9aa4b2; }
}
"""
MARKER = (
    '<marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    '<path class="head" d="M0 0L8 4L0 8z"/></marker>'
)
LINE = 17  # pixels from one line of text to the next

ACTORS = ("autograd", "Reducer", "Transport", "Optimizer")
# Each message has the numbers of its two actors and a text; "return" marks an answer, drawn with a dashed line.
GRADIENT = (
    (0, 1, "gradient of a parameter is ready (hook)"),
    (1, 1, "copy it into the flat gradient buffer, unless it is already there"),
    (1, 2, "start the all-reduce once a bucket is complete"),
    (0, 1, "the next gradients arrive while the bucket is reduced"),
    (2, 1, "return: the bucket holds the mean over ranks"),
    (0, 1, "the backward pass ends (callback)"),
    (1, 1, "wait for the buckets that are left"),
    (1, 0, "return: every .grad is a view of the buffer"),
    (3, 3, "read gradients, measure the norm, unscale, clip"),
    (3, 3, "apply the rule, store parameters and states in their formats"),
)
WRITERS = ("Checkpointer", "Saver", "Snapshot (C++)", "Writer")
CHECKPOINT = (
    (0, 0, "the ranks agree that a save is due (agreement.py)"),
    (0, 1, "begin"),
    (1, 1, "capture the state as JSON and named tensors (training_state.py, encoding.py)"),
    (1, 2, "copy the tensors and compute checksums"),
    (2, 0, "return: the tensors may change: step() returns"),
    (2, 3, "chunks are written as they become ready"),
    (3, 3, "every rank's file and record, then rank 0's manifest"),
    (3, 3, "rename the folder, which completes the checkpoint"),
)
# Each choice has its word, what happens to the tensor, and how the backward pass gets it.
CHOICES = (
    ("keep", "stays in memory", ""),
    ("pack", "stored as bits or 8-bit codes", "unpack"),
    ("offload", "copied to host memory", "copy back ahead of time"),
    ("recompute", "dropped; the operation stays on the tape", "replay from kept tensors"),
)


def text(x: float, y: float, lines: list[str], kind: str = "") -> str:
    """Writes lines of text, whose first has its middle at `y`."""
    rows = (f'<tspan x="{x}" y="{y + 4 + LINE * row}">{escape(line)}</tspan>' for row, line in enumerate(lines))
    return f'<text class="{kind}">{"".join(rows)}</text>'


def box(x: float, y: float, width: float, lines: list[str], kind: str = "") -> str:
    """Draws a box around centered lines; `x` and `y` are the middle."""
    height = 14 + LINE * len(lines)
    frame = f'<rect class="box" x="{x - width / 2}" y="{y - height / 2}" width="{width}" height="{height}" rx="5"/>'
    return frame + text(x, y - LINE * (len(lines) - 1) / 2, lines, f"middle {kind}")


def arrow(path: str, is_dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="5 4"' if is_dashed else ""
    return f'<path class="line" d="{path}" marker-end="url(#head)"{dashes}/>'


def write(name: str, width: float, height: float, title: str, parts: list[str]) -> None:
    """Writes a picture with its own paper, which keeps it readable on any page."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    body = "\n".join([f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", f"<defs>{MARKER}</defs>", *parts])
    paper = f'<rect class="paper" width="{width}" height="{height}" rx="6"/>'
    (IMAGES / name).write_text(f"{head}\n{body.replace('</defs>', '</defs>' + paper, 1)}\n</svg>\n")


def draw_sequence(name: str, title: str, actors: tuple[str, ...], messages: tuple[tuple[int, int, str], ...]) -> None:
    """Draws messages between actors, from top to bottom."""
    step = 225
    places = [90 + step * number for number in range(len(actors))]
    y, drawn = 60.0, []
    for source, target, message in messages:
        is_return, start, end = message.startswith("return: "), places[source], places[target]
        lines = textwrap.wrap(message.removeprefix("return: "), 28 * max(1, abs(target - source)))
        if source == target:
            height = max(30, LINE * len(lines))
            drawn.append(arrow(f"M{start} {y}h16v{height - 12}h-13"))
            drawn.append(text(start + 22, y + (height - 12) / 2 - LINE * (len(lines) - 1) / 2, lines))
            y += height + 12
        else:
            drawn.append(text((start + end) / 2, y, lines, "middle"))
            y += LINE * len(lines)
            drawn.append(arrow(f"M{start} {y}H{end + (2 if end < start else -2)}", is_return))
            y += 24
    lives = [f'<path class="line" opacity="0.5" d="M{place} 40V{y}"/>' for place in places]
    heads = [box(place, 28, 130, [actor], "name") for place, actor in zip(places, actors, strict=True)]
    write(name, places[-1] + 230, y + 14, title, [*lives, *heads, *drawn])


def draw_activation() -> None:
    """Draws what may happen to a tensor between forward and backward."""
    rows = [40 + 66 * number for number in range(len(CHOICES))]
    middle = (rows[0] + rows[-1]) / 2
    parts = [box(95, middle, 150, ["forward: an operation", "saves a tensor"]), arrow(f"M170 {middle}H218")]
    parts += [box(250, middle, 64, ["plan"], "name")]
    for row, (choice, result, way_back) in zip(rows, CHOICES, strict=True):
        lines = textwrap.wrap(result, 24)
        parts += [arrow(f"M282 {middle}C320 {middle} 300 {row} 338 {row}H425"), text(338, row - 11, [choice])]
        parts += [box(520, row, 190, lines), arrow(f"M615 {row}H775C815 {row} 795 {middle} 833 {middle}")]
        parts += [text(624, row - 11, [way_back])]
    write(
        "activation.svg",
        920,
        rows[-1] + 40,
        "The life of an activation",
        [*parts, box(880, middle, 94, ["backward", "uses it"])],
    )


def main() -> None:
    draw_sequence("gradient.svg", "The life of a gradient", ACTORS, GRADIENT)
    draw_sequence("checkpoint.svg", "The life of a checkpoint", WRITERS, CHECKPOINT)
    draw_activation()


if __name__ == "__main__":
    main()

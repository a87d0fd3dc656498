"""Draw rounds.svg, the bar chart of the README, from the figures in rounds.json: `python docs/figures/rounds.py`."""

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

WIDTH, HEIGHT = 760, 340
LEFT, TOP, PANEL_WIDTH, PANEL_HEIGHT, GAP = 46, 66, 330, 180, 44
BAR_WIDTH = 32
COLOURS = ("#1f6feb", "#8c959f")
LARGEST_MS, TICK_MS = 10, 2


def text(x: float, y: float, content: str, size: int = 12, anchor: str = "start", weight: str = "normal") -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{content}</text>'


def height_of(ms: float) -> float:
    return PANEL_HEIGHT * ms / LARGEST_MS


def draw_panel(panel: dict[str, Any], left: float) -> list[str]:
    """Axes, bars and labels of one panel."""
    bottom = TOP + PANEL_HEIGHT
    parts = [text(left + PANEL_WIDTH / 2, TOP - 8, panel["title"], 13, "middle", "bold")]
    for tick in range(0, LARGEST_MS + 1, TICK_MS):
        y = bottom - height_of(tick)
        parts.append(f'<line x1="{left}" x2="{left + PANEL_WIDTH}" y1="{y:g}" y2="{y:g}" stroke="#d0d7de"/>')
        parts.append(text(left - 6, y + 4, str(tick), 11, "end"))
    step = PANEL_WIDTH / len(panel["rows"])
    for number, row in enumerate(panel["rows"]):
        middle = left + step * (number + 0.5)
        for ms, colour, x in zip(row["ms"], COLOURS, (middle - BAR_WIDTH - 1, middle + 1), strict=True):
            height = height_of(float(ms))
            y = bottom - height
            parts.append(f'<rect x="{x:g}" y="{y:g}" width="{BAR_WIDTH}" height="{height:g}" fill="{colour}"/>')
            parts.append(text(x + BAR_WIDTH / 2, y - 3, ms, 11, "middle"))
        parts.append(text(middle, bottom + 16, f"batch {row['batch']}", 12, "middle"))
    return parts


def draw(figures: dict[str, Any]) -> str:
    """The chart as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="Helvetica, Arial, sans-serif" fill="#1f2328">',
        f"<title>{figures['title']}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        text(LEFT, 24, figures["title"], 15, weight="bold"),
        text(LEFT, 42, figures["unit"], 12),
    ]
    x = WIDTH - 250
    for name, colour in zip(figures["series"], COLOURS, strict=True):
        parts.append(f'<rect x="{x}" y="14" width="12" height="12" fill="{colour}"/>')
        parts.append(text(x + 18, 24, name))
        x += 120
    for number, panel in enumerate(figures["panels"]):
        parts += draw_panel(panel, LEFT + number * (PANEL_WIDTH + GAP))
    for number, line in enumerate(figures["setup"]):
        parts.append(text(LEFT, TOP + PANEL_HEIGHT + 46 + 16 * number, line, 11))
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    figures = json.loads((HERE / "rounds.json").read_text(encoding="utf-8"))
    (HERE / "rounds.svg").write_text(draw(figures), encoding="utf-8")

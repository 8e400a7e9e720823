"""The few pieces of SVG that pictures are drawn with, by hand: no plotting library."""

from html import escape

INK, FAINT = "#3c4048", "#e3e6ea"


def svg_page(title: str, body: str, width: float, height: float) -> str:
    """The whole document, on white."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif">\n'
        f"<title>{escape(title)}</title>\n"
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n{body}</svg>\n'
    )


def svg_rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>\n'


def svg_line(x1: float, y1: float, x2: float, y2: float, colour: str, *, width: float = 1.0) -> str:
    ends = f'x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"/>\n'


def svg_text(
    x: float,
    y: float,
    text: str,
    *,
    size: int,
    anchor: str = "middle",
    weight: int = 400,
    kind: str = "label",
) -> str:
    return (
        f'<text class="{kind}" x="{x:.2f}" y="{y:.2f}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}" fill="{INK}">{escape(text)}</text>\n'
    )

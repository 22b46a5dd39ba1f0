"""A `Canvas` for the pictures of the course: SVG that follows the light or dark theme of a page."""

import math
from xml.sax.saxutils import escape

WIDTH = 820  # about the width of a page on GitHub, so that text has the size that it has here

# Light and dark value of each color. The names say what the color stands for in all pictures.
COLORS = {
    "text": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9198a1"),
    "line": ("#818b98", "#6e7681"),
    "idle": ("#e6eaef", "#30363d"),
    "parameters": ("#0969da", "#1f6feb"),
    "gradients": ("#bc4c00", "#bd561d"),
    "moments": ("#1a7f37", "#238636"),
    "activations": ("#8250df", "#8957e5"),
    "rank0": ("#0969da", "#1f6feb"),
    "rank1": ("#bc4c00", "#bd561d"),
    "rank2": ("#1a7f37", "#238636"),
    "rank3": ("#8250df", "#8957e5"),
    "warning": ("#cf222e", "#da3633"),
}


def style():
    light, dark = [], []
    for name, (in_light, in_dark) in COLORS.items():
        light.append(f".{name} {{ fill: {in_light} }} .{name}-line {{ stroke: {in_light} }}")
        dark.append(f".{name} {{ fill: {in_dark} }} .{name}-line {{ stroke: {in_dark} }}")
    rules = ["text { font: 13px system-ui, -apple-system, sans-serif }"]
    rules += [
        ".small { font-size: 11.5px } .title { font-weight: 600 } .on-color { fill: #ffffff }"
    ]
    rules += [".code { font-family: ui-monospace, monospace; font-size: 12px }"]
    rules += ["path, line { fill: none; stroke-width: 1.4 }"]
    rules += light
    rules += ["@media (prefers-color-scheme: dark) {", *dark, ".on-color { fill: #ffffff }", "}"]
    return "\n".join(rules)


class Canvas:
    """An SVG picture. Coordinates are pixels from the top left corner."""

    def __init__(self, height, width=WIDTH, label=""):
        self.height, self.width, self.label = height, width, label
        self.parts = []

    def box(self, x, y, width, height, color, text="", outline=False, radius=3, text_style=""):
        """A rectangle filled with a color, or only outlined, with a text in its middle."""
        kind = (
            f'class="{color}-line" fill="none" stroke-width="1.4"'
            if outline
            else f'class="{color}"'
        )
        size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self.parts.append(f'<rect {kind} {size} rx="{radius}"/>')
        if text != "":
            color = "text" if outline or color == "idle" else "on-color"
            self.text(x + width / 2, y + height / 2 + 4.5, text, f"{color} {text_style}", "middle")

    def text(self, x, y, text, style="text", anchor="start"):
        """One line of text. `anchor` is start, middle or end; `style` has classes of `style()`."""
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        self.parts.append(f'<text class="{style}" {place}>{escape(str(text))}</text>')

    def line(self, x1, y1, x2, y2, color="line", dashed=False):
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self.parts.append(f'<line class="{color}-line" {ends}{dash}/>')

    def arrow(self, x1, y1, x2, y2, color="line", dashed=False, head=7):
        """A straight arrow from the first point to the second."""
        length = math.hypot(x2 - x1, y2 - y1)
        dx, dy = (x2 - x1) / length, (y2 - y1) / length
        self.line(x1, y1, x2 - dx * head * 0.8, y2 - dy * head * 0.8, color, dashed)
        left = (x2 - dx * head - dy * head / 2, y2 - dy * head + dx * head / 2)
        right = (x2 - dx * head + dy * head / 2, y2 - dy * head - dx * head / 2)
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in [(x2, y2), left, right])
        self.parts.append(f'<polygon class="{color}" points="{points}"/>')

    def save(self, path):
        size = (
            f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        )
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
        title = f"<title>{escape(self.label)}</title>"
        parts = [head, title, f"<style>\n{style()}\n</style>", *self.parts, "</svg>"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(parts) + "\n")

"""Draws pictures of the course as SVG files, for light and dark pages."""

STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .number { font-size: 11px; text-anchor: middle; fill: #ffffff }
  .title { font-weight: 600 }
  .forward { fill: #0969da } .backward { fill: #bc4c00 } .idle { fill: #eaeef2 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .number { fill: #ffffff }
    .forward { fill: #1f6feb } .idle { fill: #30363d }
  }
"""
WIDTH, LEFT, ROW, BOX = 820, 66, 30, 24
TITLES = {
    "1f1b": "--schedule 1f1b",
    "gpipe": "--schedule gpipe",
}


def timeline(path, measured):
    """One step of a pipeline: a row for each stage, and a box for each pass of a micro-batch.

    `measured` has for each schedule a list of [phase, start, end], in seconds, for each stage."""
    parts, y = [], 18
    longest = max(end - begin for begin, end in map(extent, measured.values()))
    scale = (WIDTH - LEFT - 10) / longest
    for schedule, stages in measured.items():
        begin, end = extent(stages)
        busy = [sum(b - a for _, a, b in passes) for passes in stages]
        idle = 1 - sum(busy) / len(busy) / (end - begin)
        title = f"{TITLES[schedule]}: {idle:.0%} idle".replace("%", " %")
        parts.append(f'<text class="title" x="0" y="{y}">{title}</text>')
        y += 10
        for number, passes in enumerate(stages):
            parts.append(f'<text x="0" y="{y + 17}">stage {number}</text>')
            parts.append(box("idle", LEFT, y, (end - begin) * scale))
            count = {"forward": 0, "backward": 0}
            for phase, start, stop in passes:
                x, width = LEFT + (start - begin) * scale, (stop - start) * scale
                parts.append(box(phase, x + 0.5, y, width - 1))
                middle = f'x="{x + width / 2:.1f}" y="{y + 16}"'
                parts.append(f'<text class="number" {middle}>{count[phase]}</text>')
                count[phase] += 1
            y += ROW
        y += 24
    parts.append(f'<g transform="translate({LEFT}, {y - 12})">')
    legend = [("forward", "forward pass of micro-batch 0, 1, …", 0)]
    legend += [("backward", "backward pass", 290), ("idle", "idle", 440)]
    for name, label, x in legend:
        parts.append(box(name, x, 0, BOX))
        parts.append(f'<text x="{x + 32}" y="17">{label}</text>')
    parts.append("</g>")
    size = f'viewBox="0 0 {WIDTH} {y + 20}" width="{WIDTH}" height="{y + 20}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>\n'
    path.write_text(head + "\n".join(parts) + "\n</svg>\n")


def extent(stages):
    begin = min(start for passes in stages for _, start, _ in passes)
    return begin, max(end for passes in stages for _, _, end in passes)


def box(name, x, y, width):
    return f'<rect class="{name}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BOX}" rx="3"/>'

"""Draws the pictures that explain the course, in outputs/figures.

    python tests/benchmarks/figures.py           all of them
    python tests/benchmarks/figures.py NAME      one of them

These pictures do not measure anything: their functions compute all that they show. Pictures of
measurements are drawn by benchmark.py, with the same `Canvas`, and are in outputs/measured."""

import sys
from pathlib import Path

import figures_collectives
import figures_layouts

FIGURES = Path(__file__).resolve().parents[2] / "outputs" / "figures"
# The name of each picture, and the function that returns it, a Canvas.
PICTURES = figures_collectives.PICTURES | figures_layouts.PICTURES


def main(names):
    """Draws the pictures with these names, or all."""
    for name in names or PICTURES:
        if name not in PICTURES:
            sys.exit(f"there is no picture {name}, one of: {', '.join(PICTURES)}")
        PICTURES[name]().save(FIGURES / f"{name}.svg")


if __name__ == "__main__":
    main(sys.argv[1:])

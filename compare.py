"""Compares runs: one table and one picture from what they have logged.

    python compare.py outputs/compare-*
    python compare.py outputs/first outputs/second --picture outputs/two.png

Each argument is the folder of a named run. The table goes to the console. The picture needs
matplotlib: pip install -e '.[compare]'
"""

import argparse
import json
import shlex
import statistics
import sys
from pathlib import Path

# Phases of a step, in their order, as in the metrics `time/…_ms`.
PHASES = ("data", "forward", "backward", "update", "log")
PHASE_COLORS = dict(zip(PHASES, ("gold", "silver", "gray", "teal", "firebrick"), strict=True))
# Titles of the columns of the table, and how their numbers are written.
COLUMNS = {
    "steps": ",.0f",
    "train/loss": ".4f",
    "eval/loss": ".4f",
    "tokens/s": ",.0f",
    "TFLOP/s per device": ".3g",
    "MFU": ".1%",
    "step, ms": ",.1f",
    "peak memory, GB": ".3f",
    "state, GB": ".3f",
    "sent per step, MB": ",.2f",
}


def main():
    args = parse_args()
    args.folders = [path for path in args.folders if not path.is_file()]  # of outputs/*
    runs = {folder.name: read_run(folder) for folder in args.folders}
    if len(runs) < len(args.folders):
        fail(f"two folders have the same name: {' '.join(folder.name for folder in args.folders)}")
    print_table(runs, args.gpu)
    draw(runs, args.picture)
    print_comet(args.folders)


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = fail
    parser.add_argument("folders", nargs="+", type=Path, help="folders of named runs")
    gpu_help = "the GPU of the runs, for their MFU: a name that plan.py knows, such as H100"
    parser.add_argument("--gpu", default="", help=gpu_help)
    default = Path(__file__).parent / "outputs" / "compare.svg"
    help = "where to write it: .svg, .png or .pdf, default: %(default)s"
    parser.add_argument("--picture", type=Path, default=default, help=help)
    return parser.parse_args()


def fail(message):
    """Ends the program with one line and exit code 2."""
    print(f"compare.py: error: {message}", file=sys.stderr)
    sys.exit(2)


def read_run(folder):
    """The logged steps of a run with a training loss, as a list of dicts: its metrics by name."""
    path = folder / "metrics.jsonl"
    try:
        text = path.read_text().splitlines(keepends=True)
        lines = [json.loads(line) for line in text if line.endswith("}\n")]  # a kill may cut one
    except OSError as error:
        fail(f"{folder} is not the folder of a run: {error}")
    except ValueError as error:
        fail(f"{path}: {error}")
    steps = [line for line in lines if "train/loss" in line]
    if not steps:
        fail(f"{path} has no line with a train/loss: the run has not logged a step yet")
    # An evaluation between two log lines has a line of its own.
    losses = [line["eval/loss"] for line in lines if line.get("eval/loss") is not None]
    if losses:
        steps[-1]["eval/loss"] = losses[-1]
    return steps


def summary(steps, peak):
    """The numbers of the table by column, None where a run has not logged one.

    Speeds and times are medians over the logged steps without the first, which is slower than the
    others: PyTorch allocates memory and compiles then."""
    last = steps[-1]
    usual = steps[1:] or steps

    def median(name):
        values = [step[name] for step in usual if step.get(name) is not None]
        return statistics.median(values) if values else None

    sent = median("comm/bytes_per_step")
    tflops = median("throughput/tflops_per_device")
    return {
        "steps": last["step"],
        "train/loss": last["train/loss"],
        "eval/loss": last.get("eval/loss"),
        "tokens/s": median("throughput/tokens_per_second"),
        "TFLOP/s per device": tflops,
        "MFU": 1e12 * tflops / peak if tflops and peak else None,
        "step, ms": median("time/total_ms"),
        "peak memory, GB": max(step["memory/peak_gb"] for step in steps),
        "state, GB": last["memory/state_gb"],
        "sent per step, MB": None if sent is None else sent / 1e6,
    }


def print_table(runs, gpu):
    """Prints a table in Markdown: a row for each run. Columns without any number are left out."""
    peak = 0
    if gpu:
        from plan import peak_flops  # takes seconds to import

        peak = peak_flops(gpu) or fail(f"--gpu {gpu}: its peak is not known")
    rows = {name: summary(steps, peak) for name, steps in runs.items()}
    columns = [title for title in COLUMNS if any(row[title] is not None for row in rows.values())]
    print(f"| run | {' | '.join(columns)} |")
    print(f"| --- |{' ---: |' * len(columns)}")
    for name, row in rows.items():
        cells = []
        for title in columns:
            number = row[title]
            cells.append("–" if number is None else format(number, COLUMNS[title]))
        print(f"| {name} | {' | '.join(cells)} |")


def draw(runs, path):
    """Draws loss, speed, memory, bytes sent, and the parts of a step."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: it needs matplotlib, pip install -e '.[compare]'")
        return
    matplotlib.use("Agg")  # no window
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    # Gray on no background can be read on a light page and on a dark one.
    for part in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"):
        matplotlib.rcParams[part] = "#737c86"
    matplotlib.rcParams["legend.frameon"] = False
    from matplotlib import pyplot

    names = list(runs)
    colors = {name: f"C{i % 10}" for i, name in enumerate(names)}
    rows = [summary(steps, 0) for steps in runs.values()]
    # About 820 pixels wide, as wide as a page on GitHub.
    figure, axes = pyplot.subplots(3, 2, figsize=(8.6, 8.5))
    (loss, legend), (rate, memory), (sent, parts) = axes

    # The curves of several runs may lie on each other: the first one is the widest.
    for i, (name, steps) in enumerate(runs.items()):
        x = [step["step"] for step in steps]
        y = [step["train/loss"] for step in steps]
        width = 1.5 + 1.5 * (len(runs) - 1 - i)
        loss.plot(x, y, color=colors[name], linewidth=width, label=name)
    loss.set(title="train/loss", xlabel="step", ylabel="nats per token")

    bars(rate, names, [row["tokens/s"] for row in rows], colors, "tokens/s", ",.0f")
    states = [row["state, GB"] for row in rows]
    if max(states) < 0.1:  # of a small model, next to which a process is mostly Python
        bars(memory, names, [1000 * x for x in states], colors, "state of a process, MB", ",.1f")
    else:
        peaks = [row["peak memory, GB"] for row in rows]
        bars(memory, names, peaks, colors, "memory, GB (dark: state)", ".2f")
        memory.barh(names, states, color="black", alpha=0.5, height=0.4)
    megabytes = [row["sent per step, MB"] for row in rows]
    bars(sent, names, megabytes, colors, "gradients sent per step, MB", ",.2f")

    left = [0.0] * len(names)
    for phase in PHASES:
        times = []
        for steps in runs.values():
            usual = steps[1:] or steps
            times.append(statistics.median(step.get(f"time/{phase}_ms", 0.0) for step in usual))
        parts.barh(names, times, left=left, label=phase, color=PHASE_COLORS[phase])
        left = [start + time for start, time in zip(left, times, strict=True)]
    parts.set(title="parts of a step, ms")
    parts.invert_yaxis()
    parts.tick_params(axis="y", length=0)

    legend.axis("off")
    handles, labels = loss.get_legend_handles_labels()
    legend.add_artist(legend.legend(handles, labels, title="runs", loc="upper left"))
    handles, labels = parts.get_legend_handles_labels()
    legend.legend(handles, labels, title="parts of a step", loc="upper right")
    figure.tight_layout()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, transparent=True)
    except (OSError, ValueError) as error:
        fail(f"--picture {path}: {error}")
    print(f"picture: {path}")


def bars(axis, names, numbers, colors, title, form):
    """Draws a bar for each run, with its number, or the words "not logged"."""
    lengths = [number or 0.0 for number in numbers]
    drawn = axis.barh(names, lengths, color=[colors[name] for name in names])
    labels = ["not logged" if number is None else format(number, form) for number in numbers]
    axis.bar_label(drawn, labels, padding=3)
    axis.set(title=title, xlim=(0, 1.3 * max(lengths) or 1.0))
    axis.invert_yaxis()
    axis.tick_params(axis="y", length=0)


def print_comet(folders):
    """Prints the page of Comet that shows the runs together, or the command that uploads them."""
    addresses = [folder / "comet.txt" for folder in folders]
    if all(path.exists() for path in addresses):
        pages = [path.read_text().strip() for path in addresses]
        project = pages[0].rsplit("/", 1)[0]
        keys = ",".join(page.rsplit("/", 1)[1] for page in pages)
        print(f"on Comet: {project}/compare?experiment-tab=panels&experiments={keys}&xAxis=step")
    archives = [str(path) for folder in folders for path in sorted(folder.glob("comet/*.zip"))]
    if archives:
        print(f"to upload what was logged offline to Comet: comet upload {shlex.join(archives)}")


if __name__ == "__main__":
    main()

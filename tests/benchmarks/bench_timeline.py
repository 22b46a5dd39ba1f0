"""Draws a step of stages 01 to 03 as torch.profiler saw it: what computes when, what is sent."""

import json
import os
import re
import subprocess
import tempfile
from itertools import pairwise
from pathlib import Path

import torch
from bench_common import (
    MEASURED,
    STAGE_01,
    STAGE_02,
    STAGE_03,
    environment,
    report,
    run_on,
    torchrun,
    two_nodes,
    write_model,
)
from bench_speed import LLAMA_25M
from canvas import WIDTH, Canvas

MBIT = 2000
SEQ_LENGTH = 128
GLOBAL_BATCH_SIZE = 16
# As many are recorded, after two that warm up. The shortest is drawn: the one that other programs
# of the machine disturb least.
STEPS = 10
STAGES = (STAGE_01, STAGE_02, STAGE_03)
CONDITIONS = (
    f"Llama of 25 M parameters, sequences of {SEQ_LENGTH} tokens. A rank is one core of a CPU"
)

# What of PyTorch starts a collective, and the function of Gloo that carries it out in a thread of
# its own. Gloo carries a reduce-scatter out as an all-reduce.
COLLECTIVES = {
    "c10d::allreduce_": ("all-reduce", "gloo:all_reduce"),
    "c10d::_allgather_base_": ("all-gather", "gloo:all_gather"),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", "gloo:all_reduce"),
}
# From where to where FSDP works on a block. What is outside has no name.
ENTERS = re.compile(r"FSDP::pre_(?:forward|backward)(?: \(model\.layers\.(\d+)\))?$")
LEAVES = re.compile(r"FSDP::post_(?:forward|backward_reduce)(?: \(.*\))?$")
SENDS = re.compile(r"FSDP::(?:all_gather|post_backward_reduce)(?: \(model\.layers\.(\d+)\))?$")
# A shorter pause between two operations is Python's work, and a longer one is a wait.
PAUSE_MS = 1.0


def recorded(module, folder):
    """Each rank writes a trace of some steps, in which each lap of the log is a mark."""
    from torch.profiler import ProfilerActivity, profile, record_function, schedule

    def export(trace):
        trace.export_chrome_trace(str(Path(folder, f"{os.environ['RANK']}.json")))

    trace = profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=STEPS, repeat=1),
        on_trace_ready=export,
        record_shapes=True,
    )
    step, lap, close = module.RunLog.step, module.RunLog.lap, module.RunLog.close

    def recorded_step(self, number, numbers):
        step(self, number, numbers)
        trace.step()

    def marked_lap(self, phase):
        lap(self, phase)
        with record_function(f"lap {phase}"):
            pass

    def close_both(self):
        trace.stop()
        close(self)

    module.RunLog.step, module.RunLog.lap = recorded_step, marked_lap
    module.RunLog.close = close_both
    # In stage 03 each token of the sample at the end gathers the whole model.
    module.sample = lambda model, tokens, start, device: tokens
    trace.start()


PATCHES = {"recorded": recorded}


# From a trace to intervals. All times are milliseconds.


def read_trace(path):
    """What happens on a rank in each step of a trace: a list of dicts `begin`, `end`, `computing`
    (of [phase, block, start, end]) and `sending` (of [collective, block, MB, start, end])."""
    trace = json.loads(path.read_text())
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    for event in events:
        event["start"] = event["ts"] / 1000
        event["end"] = (event["ts"] + event["dur"]) / 1000
    events.sort(key=lambda event: event["start"])
    laps = [event for event in events if event["name"].startswith("lap ")]
    own = [event for event in events if event["tid"] == laps[0]["tid"]]
    sending = collectives(own, events)

    steps, begin = [], None
    for lap in laps:
        phase = lap["name"].removeprefix("lap ")
        if phase == "log":
            begin = lap["end"]
        elif phase == "update" and begin is not None:
            step = {"begin": begin, "end": lap["start"]}
            step["computing"] = computing(own, laps, begin, lap["start"])
            step["sending"] = [x for x in sending if begin <= x[-2] < lap["start"]]
            steps.append(step)
            begin = None
    return steps


def collectives(own, events):
    """All collectives of a trace. `own` are the events of the thread that trains."""
    started = {"gloo:all_reduce": [], "gloo:all_gather": []}
    inside = []  # scopes of FSDP that send
    for event in own:
        if SENDS.match(event["name"]):
            inside.append(event)
        if event["name"] in COLLECTIVES:
            kind, done_by = COLLECTIVES[event["name"]]
            around = [x for x in inside[-3:] if x["end"] >= event["end"]]
            block = SENDS.match(around[-1]["name"]).group(1) if around else None
            started[done_by].append((kind, block))
    result = []
    for name, calls in started.items():
        carried_out = [event for event in events if event["name"] == name]
        for (kind, block), event in zip(calls, carried_out, strict=True):
            megabytes = 4 * values_of(event["args"].get("Input Dims", [])) / 1e6
            result.append([kind, block, megabytes, event["start"], event["end"]])
    return sorted(result, key=lambda x: x[-2])


def values_of(shapes):
    """How many values tensors of these shapes have together."""
    if not shapes:
        return 0
    if all(isinstance(size, int) for size in shapes):
        return torch.Size(shapes).numel()
    return sum(values_of(shape) for shape in shapes if isinstance(shape, list))


def computing(own, laps, begin, end):
    """When operations run between `begin` and `end`, cut where phases and blocks begin."""
    marks = [(lap["start"], "phase", lap["name"].removeprefix("lap ")) for lap in laps]
    for event in own:
        if match := ENTERS.match(event["name"]):
            marks.append((event["start"], "block", match.group(1)))
        elif LEAVES.match(event["name"]):
            marks.append((event["start"], "block", None))
    marks = sorted((x for x in marks if begin <= x[0] <= end), key=lambda x: x[0])
    busy = union([x["start"], x["end"]] for x in own if x["name"].startswith("aten::"))
    result, block, start = [], None, begin
    waiting_for_phase = 0  # intervals in front have no phase yet: a lap comes at a phase's end
    for time, kind, name in marks:
        for piece in common(busy, [[start, time]]):
            result.append(["", block, *piece])
        start = time
        if kind == "block":
            block = name
        else:
            for interval in result[waiting_for_phase:]:
                interval[0] = name
            waiting_for_phase, block = len(result), None
    return joined(result)


def joined(intervals):
    """The same without short pauses between intervals of the same phase and block."""
    result = []
    for phase, block, start, end in intervals:
        last = result[-1] if result else None
        if last and last[:2] == [phase, block] and start - last[3] < PAUSE_MS:
            last[3] = end
        else:
            result.append([phase, block, start, end])
    # Between others: the pause belongs to the interval behind it.
    for (*_, before), interval in pairwise(result):
        if interval[2] - before < PAUSE_MS:
            interval[2] = before
    return [x for x in result if x[3] - x[2] > 0.05]


def union(intervals):
    """Intervals [start, end] that do not overlap, and cover what the given ones cover."""
    result = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1][1] = max(result[-1][1], end)
        else:
            result.append([start, end])
    return result


def common(first, second):
    """What two lists of intervals have in common, if no two of the same list overlap."""
    result = []
    for a, b in first:
        for c, d in second:
            if max(a, c) < min(b, d):
                result.append([max(a, c), min(b, d)])
    return result


def length(intervals):
    return sum(end - start for start, end in intervals)


def shortest_step(ranks):
    """Of the steps of all ranks the shortest, with times from its begin."""
    numbers = range(len(ranks[0]))
    lengths = [max(x[i]["end"] for x in ranks) - min(x[i]["begin"] for x in ranks) for i in numbers]
    chosen = lengths.index(min(lengths))
    steps = [steps[chosen] for steps in ranks]
    zero = min(step["begin"] for step in steps)
    for step in steps:
        step["begin"], step["end"] = (round(step[x] - zero, 2) for x in ("begin", "end"))
        for interval in step["computing"] + step["sending"]:
            interval[-2:] = [round(time - zero, 2) for time in interval[-2:]]
        for interval in step["sending"]:
            interval[2] = round(interval[2], 2)
    return steps


# The measurement.


def timeline():
    """A step of stage 01, and of stages 02 and 03 on two nodes: a Llama of 25 M parameters."""
    measured = {}
    with tempfile.TemporaryDirectory() as folder, two_nodes(MBIT) as names:
        model = write_model(Path(folder, "model"), **LLAMA_25M)
        flags = ["-m", model, "-d", "dummy", "-s", SEQ_LENGTH, "--device", "cpu"]
        flags += ["--global-batch-size", GLOBAL_BATCH_SIZE, "--eval-sequences", 1]
        flags += ["--max-steps", STEPS + 3, "--log-freq", STEPS + 3, "--ckpt-freq", 10**9]
        for stage in STAGES:
            traces = Path(folder, stage)
            traces.mkdir()
            patch = f"recorded={traces}"
            if stage == STAGE_01:
                here = ["-b", GLOBAL_BATCH_SIZE // 2, "-e", "run", "--save-dir", folder]
                run_alone(stage, patch, [*flags, *here])
            else:
                run_on(names, stage, patch, [*flags, "-b", GLOBAL_BATCH_SIZE // 4])
            files = sorted(traces.glob("*.json"))
            measured[stage] = shortest_step([read_trace(file) for file in files])
            print(stage, [round(step["end"]) for step in measured[stage]], "ms", flush=True)
    write_table(measured)
    # The intervals go into the file with the machine, so that the pictures can be drawn again.
    path = MEASURED / "timeline.json"
    facts = json.loads(path.read_text())
    facts |= {"conditions": CONDITIONS, "mbit": MBIT, "intervals": measured}
    path.write_text(json.dumps(facts, ensure_ascii=False) + "\n")
    draw_timeline()


def run_alone(stage, patch, flags):
    command = torchrun(["--standalone", "--nproc-per-node", 1], stage, patch, flags)
    subprocess.run(command, env=environment(), check=True, capture_output=True)


def write_table(measured):
    rows = []
    for stage, steps in measured.items():
        for rank, step in enumerate(steps):
            busy = union(x[-2:] for x in step["computing"])
            sent = union(x[-2:] for x in step["sending"])
            both = length(common(busy, sent))
            row = [stage, rank, step["end"]]
            for phase in ("forward", "backward", "update"):
                row.append(length(x[-2:] for x in step["computing"] if x[0] == phase))
            row += [step["end"] - length(busy), length(sent), both]
            share = f"{100 * both / length(sent):.0f} %" if sent else "–"
            rows.append([*row[:2], *(f"{ms:,.0f}" for ms in row[2:]), share])
    head = ["stage", "rank", "step, ms", "computing: forward, ms", "backward, ms", "update, ms"]
    head += ["waiting, ms", "communicating, ms", "of which beside computing, ms", "share"]
    report("timeline", head, rows)


# The pictures.

COMPUTES = {"forward": "rank0", "backward": "rank1", "update": "rank2"}
COMMUNICATES = {"all-gather": "line", "all-reduce": "rank3", "reduce-scatter": "rank3"}
LEFT, RIGHT = 130, WIDTH - 14
ROW = 26  # height of the row of what a rank computes
SHORTEST = 0.6  # pixels: what is shorter is not drawn


class Scale:
    """Where a time is in a picture that shows the time from `begin` to `end`."""

    def __init__(self, begin, end):
        self.begin, self.end = begin, end
        self.per_ms = (RIGHT - LEFT) / (end - begin)

    def x(self, ms):
        return LEFT + (min(max(ms, self.begin), self.end) - self.begin) * self.per_ms

    def axis(self, canvas, y):
        """Ticks at round numbers, at least 60 pixels apart, counted from the begin of the step."""
        sizes = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
        distance = next(size for size in sizes if size * self.per_ms >= 60)
        canvas.line(LEFT, y, RIGHT, y)
        ms = -(-self.begin // distance) * distance
        while ms <= self.end:
            canvas.line(self.x(ms), y, self.x(ms), y + 5)
            center = min(self.x(ms), WIDTH - 19)  # so that the last number is not cut off
            canvas.text(center, y + 19, f"{ms:,.0f}", "muted", "middle")
            ms += distance
        canvas.text(LEFT - 12, y + 19, "ms", "muted", "end")


def draw_timeline():
    """Pictures of the intervals in timeline.json: all stages, and one of each."""
    facts = json.loads((MEASURED / "timeline.json").read_text())
    measured, conditions = facts["intervals"], facts["conditions"]
    link = f"{conditions}, a link carries {facts['mbit'] / 1000:g} Gbit/s."
    draw_all(measured, link)
    draw_first(measured[STAGE_01], f"{conditions}.")
    draw_buckets(measured[STAGE_02], link)
    draw_blocks(measured[STAGE_03], link)


def draw_all(measured, conditions):
    canvas = Canvas(0, label="One step of stages 01, 02 and 03, measured")
    scale = Scale(0, max(step["end"] for steps in measured.values() for step in steps))
    y = 16
    for stage, steps in measured.items():
        sequences = GLOBAL_BATCH_SIZE // 2 // len(steps)
        title = f"{stage}: 2 micro-batches of {sequences} sequences"
        title += " on each of 2 ranks" if len(steps) > 1 else ""
        canvas.text(0, y, title, "text title")
        total = max(step["end"] for step in steps)
        canvas.text(RIGHT, y, f"one step: {total:,.0f} ms", "muted", "end")
        y += 12
        for rank, step in enumerate(steps):
            y = draw_rank(canvas, y, scale, step, f"rank {rank} ", len(steps) > 1, lane=11) + 8
        y += 18
    scale.axis(canvas, y - 12)
    names = [*COMPUTES, "idle", "all-gather", "all-reduce, reduce-scatter"]
    finish(canvas, y + 34, names, conditions, "timeline")


def draw_first(steps, conditions):
    canvas = Canvas(0, label="One step of stage 01, measured")
    scale = Scale(0, steps[0]["end"])
    canvas.text(0, 16, "A step of stage 01: 2 micro-batches, then the update", "text title")
    canvas.text(RIGHT, 16, f"{scale.end:,.0f} ms", "muted", "end")
    y = draw_rank(canvas, 28, scale, steps[0], "", False)
    scale.axis(canvas, y + 4)
    finish(canvas, y + 50, [*COMPUTES], conditions, "timeline-01")


def draw_buckets(steps, conditions):
    """Stage 02: the backward pass of the last micro-batch, and the update."""
    backward = [x[2] for step in steps for x in phase_of(step, "backward", -1)]
    scale = Scale(min(backward), max(step["end"] for step in steps))
    canvas = Canvas(0, label="The all-reduces of stage 02 beside the backward pass, measured")
    canvas.text(0, 16, "Stage 02: the last backward pass of a step, and the update", "text title")
    y = 28
    for rank, step in enumerate(steps):
        y = draw_rank(canvas, y, scale, step, f"rank {rank} ", True, lane=22, sizes=True) + 14
    scale.axis(canvas, y - 6)
    names = ["backward", "update", "idle", "all-reduce of a bucket"]
    finish(canvas, y + 42, names, conditions, "timeline-02")


def draw_blocks(steps, conditions):
    """Stage 03: forward and backward pass of the last micro-batch, on rank 0, in two lines.

    FSDP starts its collectives on streams of a GPU, beside the computation. On a CPU there are no
    streams, and each call returns when the collective has ended."""
    step = steps[0]
    begin = phase_of(step, "backward", 0)[-1][3]
    end = phase_of(step, "backward", -1)[-1][3]
    canvas = Canvas(0, label="All-gathers and reduce-scatters of stage 03, measured")
    title = "Stage 03, rank 0: a micro-batch. On a CPU, FSDP waits for each collective"
    canvas.text(0, 16, title, "text title")
    y = 28
    middle = (begin + end) / 2
    for part in (Scale(begin, middle), Scale(middle, end)):
        y = draw_rank(canvas, y, part, step, "", True, lane=22, blocks=True) + 8
        part.axis(canvas, y)
        y += 42
    names = ["forward", "backward", "idle", "all-gather", "reduce-scatter"]
    finish(canvas, y + 6, names, f"Numbers are those of the blocks. {conditions}", "timeline-03")


def phase_of(step, phase, number):
    """Intervals of one of the passes: of the first micro-batch (0), or of the last one (-1)."""
    passes, last = [], None
    for interval in step["computing"]:
        if interval[0] != last:
            passes.append((interval[0], []))
            last = interval[0]
        passes[-1][1].append(interval)
    return [intervals for name, intervals in passes if name == phase][number]


def draw_rank(canvas, y, scale, step, name, sends, lane=0, sizes=False, blocks=False):
    """Rows of a rank: when it computes, and below it when it communicates. Returns the lower end.

    Gloo has two threads, so two collectives may run at a time: there are two lanes."""
    canvas.text(LEFT - 12, y + ROW / 2 + 4.5, f"{name}computes", "text", "end")
    begin, end = scale.x(step["begin"]), scale.x(step["end"])
    canvas.box(begin, y, end - begin, ROW, "idle", radius=0)
    for phase, block, *times in step["computing"]:
        if phase in COMPUTES:
            text = phase
            if blocks and phase != "update":
                text = block or ""
            draw_interval(canvas, y, ROW, scale, times, COMPUTES[phase], text)
    y += ROW + 2
    if not sends:
        return y
    canvas.text(LEFT - 12, y + lane / 2 + 4.5, "communicates", "text", "end")
    ends = [0, 0]
    for kind, block, megabytes, *times in step["sending"]:
        if times[1] < scale.begin or times[0] > scale.end:
            continue
        number = 0 if ends[0] <= times[0] else 1
        ends[number] = times[1]
        text = ""
        if sizes and megabytes > 0.1:
            text = f"{megabytes:.0f} MB"
        if blocks:
            text = block or ""
        row = y + number * (lane + 2)
        draw_interval(canvas, row, lane, scale, times, COMMUNICATES[kind], text)
    return y + lane + (lane + 2 if ends[1] else 0)


def draw_interval(canvas, y, height, scale, times, color, text):
    """A box, with a text if there is room."""
    x, width = scale.x(times[0]), scale.x(times[1]) - scale.x(times[0])
    if width >= SHORTEST:
        fits = width >= 7 * len(text) + 4
        gap = min(1, width / 4)
        style = "small"
        canvas.box(
            x, y, width - gap, height, color, text if fits else "", radius=1.5, text_style=style
        )


def finish(canvas, y, names, conditions, file):
    """Draws the legend and the conditions below a picture, and saves it."""
    x = 0
    for name in names:
        color = "idle" if name == "idle" else (COMPUTES | COMMUNICATES).get(name, "rank3")
        text = "waiting" if name == "idle" else name
        canvas.box(x, y - 13, 18, 18, color)
        canvas.text(x + 25, y + 1, text)
        x += 25 + 7.6 * len(text) + 22
    canvas.text(0, y + 31, conditions, "muted small")
    canvas.height = y + 40
    canvas.save(MEASURED / f"{file}.svg")

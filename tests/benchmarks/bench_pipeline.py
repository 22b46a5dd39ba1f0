"""Measures stage 08: which pipeline stage computes when, what it keeps, and what it sends."""

import contextlib
import json
import os
import statistics
import subprocess
import tempfile
import time
import weakref
from pathlib import Path

import torch
import transformers
from bench_common import MEASURED, STAGE_08, environment, report, torchrun, write_model
from bench_speed import must_agree, run_and_count, setting
from canvas import WIDTH, Canvas
from torch.distributed.tensor import DTensor

# How long a forward pass of a pipeline stage takes, and a backward pass, which is twice the work.
FORWARD, BACKWARD = 1, 2
UNIT_SECONDS = 0.02
STEPS = 6
# Each number of pipeline stages below divides the blocks. The output layer is hardly any work.
EIGHT_BLOCKS = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8}
SETTINGS = [(2, 2), (2, 8), (4, 4), (4, 8), (4, 16)]
SCHEDULES = ("1f1b", "gpipe")


def bubble(num_stages, micro_batches):
    """The share of a step in which a pipeline stage is idle, if all stages take equally long."""
    return (num_stages - 1) / (micro_batches + num_stages - 1)


def run_patched(patch, model, num_stages, micro_batches, schedule, *more):
    """A short run of one pipeline with functions changed: what each pipeline stage has written."""
    flags = ["-m", model, "-d", "dummy", "-s", 32, "-b", 1, "--global-batch-size", micro_batches]
    flags += ["--max-steps", STEPS, "--eval-sequences", 1, "--stages", num_stages]
    flags += ["--schedule", schedule, *more]
    with tempfile.TemporaryDirectory() as folder:
        how = ["--standalone", "--nproc-per-node", num_stages]
        command = torchrun(how, STAGE_08, f"{patch}={folder}", flags)
        subprocess.run(command, env=environment(), check=True, capture_output=True)
        files = [Path(folder, f"{stage}.json") for stage in range(num_stages)]
        return [json.loads(file.read_text()) for file in files]


def idle_shares(stages):
    """Of each pipeline stage's [phase, start, end] in a step, the share of it that it is idle."""
    begin = min(start for passes in stages for _, start, _ in passes)
    end = max(end for passes in stages for _, _, end in passes)
    return [1 - sum(b - a for _, a, b in passes) / (end - begin) for passes in stages]


def pipeline_bubble():
    """The bubble: by the formula, measured with passes that sleep, and with real computation.

    Passes that sleep take equally long on each pipeline stage, also if there are more stages than
    cores. With real computation the last stage has the output layer and the loss in addition."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        small = write_model(Path(folder, "small"), **EIGHT_BLOCKS)
        wide = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8}
        large = write_model(Path(folder, "large"), **wide)
        for num_stages, micro_batches in SETTINGS:
            row = [num_stages, micro_batches, percent(bubble(num_stages, micro_batches))]
            for schedule in SCHEDULES:
                row.append(measured_bubble("slept", small, num_stages, micro_batches, schedule))
            real = "–"
            if num_stages <= os.cpu_count():
                how = (large, num_stages, micro_batches, "1f1b")
                real = measured_bubble("timed", *how, "-s", 256)
            rows.append([*row, real])
            print(rows[-1], flush=True)
    head = ["pipeline stages S", "micro-batches M", "(S − 1) / (M + S − 1)"]
    head += ["1F1B, passes that sleep", "GPipe, passes that sleep", "1F1B, real computation"]
    report("pipeline-bubble", head, rows)


def percent(share):
    return f"{100 * share:.1f} %"


def measured_bubble(patch, *how):
    """The median over the steps but the first one, of the mean over the pipeline stages."""
    steps = zip(*run_patched(patch, *how), strict=True)
    shares = [statistics.mean(idle_shares(stages)) for stages in steps]
    return percent(statistics.median(shares[1:]))


def pipeline_timeline():
    """A picture of one step with 4 pipeline stages and 8 micro-batches, as it was measured."""
    with tempfile.TemporaryDirectory() as folder:
        small = write_model(Path(folder, "small"), **EIGHT_BLOCKS)
        measured = {}
        for schedule in reversed(SCHEDULES):
            stages = run_patched("slept", small, 4, 8, schedule)
            measured[schedule] = [passes[-1] for passes in stages]
    draw_timeline(MEASURED / "pipeline-timeline.svg", measured)


TITLES = {"1f1b": "--schedule 1f1b", "gpipe": "--schedule gpipe"}


def draw_timeline(path, measured):
    """One step of a pipeline: a row for each of its stages, a box for each pass of a micro-batch.

    `measured` has for each schedule a list of [phase, start, end], in seconds, for each stage."""
    left, row = 66, 30
    colors = {"forward": "rank0", "backward": "rank1"}
    longest = max(end - begin for begin, end in map(extent, measured.values()))
    scale = (WIDTH - left - 10) / longest
    height = sum(34 + row * len(stages) for stages in measured.values()) + 50
    canvas = Canvas(height, label="One step of a pipeline, measured")
    y = 18
    for schedule, stages in measured.items():
        begin, end = extent(stages)
        busy = [sum(b - a for _, a, b in passes) for passes in stages]
        idle = 1 - sum(busy) / len(busy) / (end - begin)
        canvas.text(0, y, f"{TITLES[schedule]}: {100 * idle:.0f} % idle", "text title")
        y += 10
        for number, passes in enumerate(stages):
            canvas.text(0, y + 17, f"stage {number}")
            canvas.box(left, y, (end - begin) * scale, 24, "idle")
            count = {"forward": 0, "backward": 0}
            for phase, start, stop in passes:
                x, width = left + (start - begin) * scale, (stop - start) * scale
                canvas.box(
                    x + 0.5, y, width - 1, 24, colors[phase], count[phase], text_style="small"
                )
                count[phase] += 1
            y += row
        y += 24
    legend = [("rank0", "forward pass of micro-batch 0, 1, …", 0)]
    legend += [("rank1", "backward pass", 290), ("idle", "idle", 440)]
    for color, label, x in legend:
        canvas.box(left + x, y - 12, 24, 24, color)
        canvas.text(left + x + 32, y + 5, label)
    canvas.save(path)


def extent(stages):
    begin = min(start for passes in stages for _, start, _ in passes)
    return begin, max(end for passes in stages for _, _, end in passes)


def pipeline_memory():
    """What a pipeline stage keeps for backward passes at most, in activations of a micro-batch."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        small = write_model(Path(folder, "small"), **EIGHT_BLOCKS)
        for micro_batches in (4, 8):
            for schedule in SCHEDULES:
                stages = run_patched("kept", small, 4, micro_batches, schedule, "--max-steps", 2)
                ratios = [f"{most / first:.2f}" for first, most in stages]
                rows.append([schedule, micro_batches, *ratios])
                print(rows[-1], flush=True)
    head = ["schedule", "micro-batches M", "pipeline stage 0", "stage 1", "stage 2", "stage 3"]
    report("pipeline-memory", head, rows)


def pipeline():
    """Stage 08 on 4 processes: one pipeline stage, two and four. The tokens of a step are the same.

    What 7 steps send more than 3 is for 4 steps."""
    rows, losses = [], []
    with tempfile.TemporaryDirectory() as folder:
        how = setting(folder, "Llama, 25 M") | {"global_batch_size": 16, "warm": 1}
        config = transformers.AutoConfig.from_pretrained(how["model"])
        for num_stages in (1, 2, 4):
            how["batch_size"] = 2
            more = ("--stages", str(num_stages))
            _, sent_by_3 = run_and_count(how | {"steps": 3}, STAGE_08, None, *more, processes=4)
            lines, sent_by_7 = run_and_count(how | {"steps": 7}, STAGE_08, None, *more, processes=4)
            losses.append({line["step"]: line["train/loss"] for line in lines})
            must_agree({"losses": losses[0]}, list(losses[-1].values()))
            row = [f"{num_stages}, {4 // num_stages}"]
            row.append(f"{1000 * lines[-1]['memory/state_gb']:.1f}")
            row.append(f"{(sent_by_7 - sent_by_3) / 4e6:.1f}")
            for count in sent_by_formula(config, 4, num_stages, how):
                row.append(f"{count / 1e6:.1f}")
            rows.append(row)
            print(row, flush=True)
    head = ["(pipeline stage, shard), 25.3 M parameters", "state of the largest rank, MB"]
    head += ["sent by a rank per step, MB", "by the formulas: FSDP, MB"]
    head.append("between pipeline stages, MB")
    report("pipeline", head, rows)


def sent_by_formula(config, processes, num_stages, how):
    """Bytes that a rank sends in a step on average, fp32: by FSDP, and to other pipeline stages.

    Gloo carries a reduce-scatter out as an all-reduce, which sends twice as much."""
    pipelines = processes // num_stages
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    in_blocks = sum(p.numel() for p in model.model.layers.parameters())
    outside = model.num_parameters() - in_blocks
    micro_batches = how["global_batch_size"] // pipelines // how["batch_size"]
    # In each micro-batch: all-gathers of blocks in the forward and in the backward pass, and a
    # reduce-scatter. What is outside of the blocks stays gathered from forward to backward.
    gathered_and_reduced = micro_batches * ((2 + 2) * in_blocks + (1 + 2) * outside)
    by_fsdp = 4 * (pipelines - 1) / pipelines * gathered_and_reduced / num_stages
    tokens = how["batch_size"] * how["seq_length"]
    boundaries = (num_stages - 1) / num_stages
    between_stages = 2 * boundaries * micro_batches * 4 * tokens * config.hidden_size
    return by_fsdp, between_stages


# Patches, which `benchmark.py worker` applies to stage 08. Each rank writes a file.


def write(folder, values):
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(values))


def wrap_forward(module, after, around=contextlib.nullcontext):
    """Has each forward pass in training run inside `around(model)`, and then call `after`."""
    forward_pass = module.forward_pass

    def wrapped(model, stage, inputs):
        if not torch.is_grad_enabled():
            return forward_pass(model, stage, inputs)
        with around(model):
            outputs = forward_pass(model, stage, inputs)
        after(outputs)
        return outputs

    module.forward_pass = wrapped


def wrap_lap(module, act):
    """Has each lap of the log call `act(phase)`."""
    lap = module.RunLog.lap

    def wrapped(log, phase):
        lap(log, phase)
        act(phase)

    module.RunLog.lap = wrapped


def timed(module, folder, seconds=0.0):
    """Writes [phase, start, end] of each forward and backward pass, a list for each step."""
    steps, passes, done = [], [], set()
    last = [0.0]

    def after(outputs):
        done.add("forward")
        time.sleep(FORWARD * seconds)
        outputs.register_hook(before_backward)

    def before_backward(_):
        done.add("backward")
        time.sleep(BACKWARD * seconds)

    def note(phase):
        now = time.perf_counter()
        if phase in done:  # in some rounds a pipeline stage has no forward or no backward pass
            passes.append([phase, last[0], now])
            done.remove(phase)
        if phase == "update":
            steps.append(passes.copy())
            passes.clear()
            write(folder, steps)
        last[0] = now

    wrap_forward(module, after)
    wrap_lap(module, note)


def slept(module, folder):
    """As `timed`, but each pass takes its time by sleeping, whatever the machine can do."""
    timed(module, folder, UNIT_SECONDS)


def kept(module, folder):
    """Writes the bytes of the activations that are kept after the first forward pass of a step,
    and at the most."""
    saved, counts = [], []

    def around(model):
        def pack(tensor):
            # Also weights are saved for the backward pass. They are no activations.
            weights = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
            of_weights = {weight.untyped_storage().data_ptr() for weight in weights}
            if tensor.untyped_storage().data_ptr() not in of_weights:
                saved.append(weakref.ref(tensor))
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def count(outputs):
        storages = {}
        for reference in saved:
            tensor = reference()
            if tensor is not None:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        counts.append(sum(storages.values()))

    def note(phase):
        if phase == "data":
            counts.clear()
        if phase == "update":
            write(folder, [counts[0], max(counts)])

    wrap_forward(module, count, around)
    wrap_lap(module, note)


def virtual(module, folder):
    """Writes when the last pass of each step ends, and the time of all passes, by a virtual clock.

    A pass advances the clock of its pipeline stage. When two stages exchange tensors, both clocks
    become the later of the two: neither can go on before the other is there. So the result does not
    depend on the machine."""
    clock, busy, end, steps = [0], [0], [0], []
    exchange = module.PipelineStage.exchange

    def advance(units):
        clock[0] += units
        busy[0] += units
        end[0] = clock[0]

    def exchange_clocks(stage, other, sent, received):
        exchange(stage, other, sent, received)
        if torch.is_grad_enabled() and (sent is not None or received is not None):
            other_clock = torch.tensor([0])
            exchange(stage, other, torch.tensor(clock), other_clock)
            clock[0] = max(clock[0], other_clock.item())

    def after(outputs):
        advance(FORWARD)
        outputs.register_hook(lambda _: advance(BACKWARD))

    def note(phase):
        if phase == "data":
            clock[0] = busy[0] = 0
        if phase == "update":
            steps.append([end[0], busy[0]])
            write(folder, steps)

    module.PipelineStage.exchange = exchange_clocks
    wrap_forward(module, after)
    wrap_lap(module, note)


PATCHES = {"timed": timed, "slept": slept, "kept": kept, "virtual": virtual}

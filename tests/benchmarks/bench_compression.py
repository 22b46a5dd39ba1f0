"""Measures stage 04: bytes, slow links, encoding, loss. Controls, what was tried and left out."""

import argparse
import itertools
import json
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_common import (
    GPU,
    MEASURED,
    STAGE_02,
    STAGE_04,
    environment,
    report,
    run_on,
    torchrun,
    two_nodes,
    write_model,
)
from canvas import WIDTH, Canvas
from conftest import load, metrics

# Patches of stage 04: each changes its GradientCompressor.


def silent(module, _):
    """Gradients stay at home: what else a run sends."""
    module.GradientCompressor.__call__ = lambda self, owner, gradient: None


def each(choose):
    """Makes a patch: indices that `choose` chooses for each chunk, in the place of common ones.

    `choose` gets the compressor and the chunks, (n, chunk) fp32, and returns a mask of their shape
    with as many values on each replica."""

    def patch(module, _):
        start_step = module.GradientCompressor.start_step

        def start_and_note(self, step, device):
            start_step(self, step, device)
            self.step = step

        def average_chosen(self, gradient):
            padding = -len(gradient) % self.chunk
            rows = F.pad(gradient, (0, padding)).view(-1, self.chunk)
            if self.mode == "dct":
                rows = rows @ module.dct_basis(self.chunk, gradient.device).T
            if not replays(self):
                self.chosen = choose(self, rows).flatten().nonzero().flatten()
            mean = self.average_all(rows.flatten()[self.chosen])
            rows = torch.zeros_like(rows).flatten().index_copy_(0, self.chosen, mean)
            rows = rows.view(-1, self.chunk)
            if self.mode == "dct":
                rows = rows @ module.dct_basis(self.chunk, gradient.device)
            return rows.flatten()[: len(gradient)]

        module.GradientCompressor.start_step = start_and_note
        module.GradientCompressor.average_subset = average_chosen

    return patch


def largest(compressor, rows):
    """Where one replica has the largest of each chunk, which it tells by a bit a value. The
    replicas lead in turn. Source: CLT-k of ScaleCom, arXiv:2104.11125."""
    group = compressor.group
    leader = compressor.step % group.size()
    mask = torch.zeros_like(rows, dtype=torch.uint8)
    if group.rank() == leader:
        indices = rows.abs().topk(compressor.num_kept, sorted=False).indices
        mask.scatter_(1, indices, 1)
    powers = 2 ** torch.arange(8, dtype=torch.uint8)
    packed = (mask.view(-1, 8) * powers).sum(1, dtype=torch.uint8)
    compressor.lap("encode")

    dist.broadcast(packed, group=group, group_src=leader)
    compressor.lap("communicate")
    compressor.bytes_sent += (group.size() - 1) / group.size() * packed.nbytes
    return (packed[:, None] & powers).view_as(rows)


DRAW = torch.Generator().manual_seed(0)


def lowest(compressor, rows):
    """The classical truncation: the lowest frequencies, always the same ones."""
    return torch.arange(rows.shape[1]).expand_as(rows) < compressor.num_kept


def common(compressor, rows):
    """The same indices for all chunks."""
    generator = torch.Generator().manual_seed(compressor.step)
    indices = torch.randperm(rows.shape[1], generator=generator)[: compressor.num_kept]
    return torch.isin(torch.arange(rows.shape[1]), indices).expand_as(rows)


def drawn(compressor, rows):
    """Indices drawn anew for each chunk."""
    indices = torch.rand(rows.shape, generator=DRAW).topk(compressor.num_kept).indices
    return torch.zeros(rows.shape).scatter_(1, indices, 1)


def feedback(module, decay):
    """What a rank did not send, times `decay`, is added to its next gradient of the same module."""
    residuals = {}
    call = module.GradientCompressor.__call__
    average_all = module.GradientCompressor.average_all

    def average_and_note(self, values):
        rows = module.encode(F.pad(values, (0, -len(values) % module.ROW_LENGTH)), self.wire_dtype)
        self.own = module.decode(rows, self.wire_dtype)[: len(values)]
        return average_all(self, values)

    def call_with_feedback(self, owner, gradient):
        if self.mode == "none" or not self.is_last:
            call(self, owner, gradient)
            return
        if owner in self.sums:
            gradient += self.sums.pop(owner)
        if owner in residuals:
            gradient += float(decay) * residuals[owner]
        given = gradient.clone()
        call(self, owner, gradient)
        residuals[owner] = given - sent_by_this_rank(self, given)

    module.GradientCompressor.average_all = average_and_note
    module.GradientCompressor.__call__ = call_with_feedback


def sent_by_this_rank(compressor, gradient):
    """What the replicas would have got from this rank alone of the gradient averaged last."""
    if compressor.mode not in ("randk", "dct"):
        return compressor.own
    compressor.average_all = lambda values: compressor.own  # hides the method: nothing is sent
    sent = compressor.average_subset(gradient)
    del compressor.average_all
    return sent


def replays(compressor):
    """Whether `sent_by_this_rank` is at work: then indices must be those of before."""
    return "average_all" in vars(compressor)


def warmup(module, steps):
    """Dense for the first `steps`."""
    start_step = module.GradientCompressor.start_step

    def start_dense(self, step, device):
        start_step(self, step, device)
        if step == 1:
            self.mode_after_warmup = self.mode
        self.mode = "none" if step <= int(steps) else self.mode_after_warmup

    module.GradientCompressor.start_step = start_dense


def power_sgd(module, value):
    """PyTorch's PowerSGD hook on stage 02: rank and dense steps before it, as `16/60`.

    Source: Vogels et al., arXiv:1905.13727."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    rank, dense_steps = map(int, value.split("/"))
    state = power.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=dense_steps
    )
    wrap = module.DistributedDataParallel
    close = module.RunLog.close

    def wrapped(model, **options):
        # One bucket: those of several mix up their collectives on gloo, and the run aborts.
        model = wrap(model, bucket_cap_mb=10_000, **options)
        model.register_comm_hook(state, power.powerSGD_hook)
        return model

    def close_and_say(log):
        module.say(f"PowerSGD sent 1/{state.compression_stats()[0]:.2f} of the values")
        close(log)

    module.DistributedDataParallel = wrapped
    module.RunLog.close = close_and_say


def fp16_hook(module, _):
    """PyTorch's hook on stage 02 that casts gradients to fp16."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    wrap = module.DistributedDataParallel

    def wrapped(model, **options):
        model = wrap(model, **options)
        model.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
        return model

    module.DistributedDataParallel = wrapped


PATCHES = {
    "silent": silent,
    "warmup": warmup,
    "feedback": feedback,
    "largest": each(largest),
    "low": each(lowest),
    "common": each(common),
    "drawn": each(drawn),
    "powersgd": power_sgd,
    "fp16": fp16_hook,
}


def small_steps(folder, steps):
    """Flags of a run of many parameters on few tokens: the link is measured and not the CPU."""
    sizes = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6}
    flags = ["-m", write_model(Path(folder), **sizes), "-s", 64, "--global-batch-size", 8, "-b", 4]
    flags += ["--max-steps", steps, "--eval-sequences", 1, "--log-freq", 1, "--ckpt-freq", 10**9]
    return [*flags, "--device", "cpu"]


# Ways to compress: --compression, --wire-dtype, --keep-ratio.
COMPRESSIONS = {
    "none": ("none", "fp32", 1),
    "bf16": ("bf16", "fp32", 1),
    "int8": ("int8", "fp32", 1),
    "int4": ("int4", "fp32", 1),
    "randk, half in int8": ("randk", "int8", 0.5),
    "randk, half in int4": ("randk", "int4", 0.5),
    "randk, quarter in int4": ("randk", "int4", 0.25),
    "dct, half in fp32": ("dct", "fp32", 0.5),
    "dct, half in int8": ("dct", "int8", 0.5),
}


def flags_of(way):
    mode, wire_dtype, keep_ratio = COMPRESSIONS[way]
    flags = ["--shard-size", 1, "--compression", mode, "--wire-dtype", wire_dtype]
    return [*flags, "--keep-ratio", keep_ratio]


def wire():
    """Payload per step on the interface, less that of a run without gradients, against the log."""
    steps = 6
    rows = []
    with tempfile.TemporaryDirectory() as folder, two_nodes() as names:
        flags = small_steps(folder, steps)
        quiet = statistics.mean(run_on(names, STAGE_04, "silent", [*flags, *flags_of("none")])[1])
        for way in COMPRESSIONS:
            lines, sent = run_on(names, STAGE_04, None, [*flags, *flags_of(way)])
            seen = (statistics.mean(sent) - quiet) / steps
            logged = statistics.mean(line["comm/bytes_per_step"] for line in lines)
            rows.append(
                [way, f"{logged:,.0f}", f"{seen:,.0f}", f"{100 * (seen / logged - 1):+.2f} %"]
            )
            print(rows[-1], flush=True)
            if abs(seen / logged - 1) > 0.05:
                sys.exit(f"{way}: what is logged is not what is sent")
    report("wire", ["mode", "bytes per step, logged", "on the interface", "difference"], rows)


SPEEDS = (50, 200, 1000)
DDP = "stage 02, DDP in fp32"


def link():
    """Time of a step on slow links: median over steps, ratios to DDP on the same link.

    Prints for each way to compress from which speed of a link on it is too slow."""
    modes = {
        DDP: (STAGE_02, None, ()),
        "stage 02, PyTorch's fp16 hook": (STAGE_02, "fp16", ()),
        "stage 02, PyTorch's PowerSGD, rank 16": (STAGE_02, "powersgd=16/2", ()),
    }
    for way in COMPRESSIONS:
        modes[f"stage 04, {way}"] = (STAGE_04, None, flags_of(way))

    seconds = {}
    for mbit in SPEEDS:
        with tempfile.TemporaryDirectory() as folder, two_nodes(mbit) as names:
            for mode, (stage, patch, flags) in modes.items():
                lines, _ = run_on(names, stage, patch, [*small_steps(folder, 8), *flags])
                line = medians(lines[3:])
                seconds[mode, mbit] = line["time/total_ms"] / 1000
                print(mode, mbit, round(seconds[mode, mbit], 3), flush=True)
                if line.get("comm/encode_ms"):
                    say_break_even(mode, break_even_mbit(line, hidden_ms=0.0))

    rows = []
    for mode in modes:
        row = [mode]
        for mbit in SPEEDS:
            ratio = seconds[DDP, mbit] / seconds[mode, mbit]
            row += [f"{seconds[mode, mbit]:.2f}", f"{ratio:.1f} ×"]
        rows.append(row)
    head = ["mode"]
    for mbit in SPEEDS:
        head += [f"s per step, {mbit} Mbit/s", "speed of DDP"]
    report("link", head, rows)


def medians(lines):
    """Of each metric that all lines have, its median."""
    names = set.intersection(*(set(line) for line in lines))
    return {name: statistics.median(line[name] for line in lines) for name in names}


def break_even_mbit(line, hidden_ms):
    """The speed of a link in Mbit/s below which a run's compression beats none, from its log.

    At speed v, none takes uncompressed / v, and compression sent / v + encode_ms. The backward
    hides `hidden_ms` of the sending."""
    sent = line["comm/bytes_per_step"]
    uncompressed = sent * line["comm/compression_ratio"]
    encode_ms = line["comm/encode_ms"]
    bytes_per_ms = min((uncompressed - sent) / encode_ms, uncompressed / (hidden_ms + encode_ms))
    return max(0.0, 0.008 * bytes_per_ms)


def say_break_even(mode, mbit):
    print(f"{mode} beats none on links of less than {mbit:,.0f} Mbit/s per rank", flush=True)


def break_even(run_dir, processes):
    """Says it for a run of stage 04, of so many processes, by the last line of its log.

    On a GPU the backward of a step's last micro-batch, which takes twice its forward, hides that
    much of the sending. Whether it was on a GPU is what this machine would do."""
    run_dir = Path(run_dir)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--device")
    parser.add_argument("--compression")
    parser.add_argument("--global-batch-size", type=int)
    parser.add_argument("--batch-size", type=int)
    flags, others = parser.parse_known_args(shlex.split((run_dir / "flags.txt").read_text()))
    lines = [line for line in metrics(run_dir).values() if line.get("comm/encode_ms")]
    if not lines:
        sys.exit(f"{run_dir}: its log has no time of encoding, so nothing was compressed")

    hidden_ms = 0.0
    if GPU and flags.device != "cpu":
        sequences_per_rank = math.ceil(flags.global_batch_size / int(processes))
        micro_batches = math.ceil(sequences_per_rank / flags.batch_size)
        hidden_ms = 2 * lines[-1]["time/forward_ms"] / micro_batches
    say_break_even(flags.compression, break_even_mbit(lines[-1], hidden_ms))


def encode():
    """GB/s of fp32 gradients through encoder and decoder, and through a plain copy."""
    module = load(STAGE_04)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    gradient = torch.randn(2**27 if device.type == "cuda" else 2**23, device=device)
    laps = []

    def lap(phase):
        if device.type == "cuda":
            torch.cuda.synchronize()
        laps.append((phase, time.perf_counter()))

    def copy_once(gradient):
        lap("backward")
        gradient.clone()
        lap("encode")

    def spent(work, start_step):
        """Seconds of encoding and decoding, the median of ten."""
        times = []
        for step in range(12):
            start_step(step, device)
            laps.clear()
            work(gradient.clone())
            phases = itertools.pairwise(laps)
            times.append(sum(now - last for (_, last), (phase, now) in phases if phase == "encode"))
        return statistics.median(times[2:])

    copy = spent(copy_once, lambda step, device: None)
    rows = [["copy", f"{gradient.nbytes / copy / 1e9:.2f}", "1.0", "–", "–"]]
    for way in list(COMPRESSIONS)[1:]:
        mode, wire_dtype, keep_ratio = COMPRESSIONS[way]
        row = [way]
        for is_compiled in (False, True):
            settings = (mode, keep_ratio, 256, wire_dtype, is_compiled, False, lap)
            compressor = module.GradientCompressor(dist.group.WORLD, *settings)
            seconds = spent(partial(compressor, "a module"), compressor.start_step)
            row += [f"{gradient.nbytes / seconds / 1e9:.2f}", f"{seconds / copy:.1f}"]
        rows.append(row)
        print(row, flush=True)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "one CPU core"
    head = [f"mode, {name}", "GB/s of fp32", "times a copy", "`--compile`, GB/s", "times a copy"]
    report(f"encode-{device.type}", head, rows)
    dist.destroy_process_group()


# The best learning rate of dense, as far as the sweep shows, and one above it, where modes rank
# otherwise: a mode that takes smaller steps gains there.
LR, HIGH_LR = 5e-4, 1e-3
SWEEP = (2.5e-4, 3.5e-4, LR, 7e-4, HIGH_LR)
# Name: patches (see above), --compression, --wire-dtype, --keep-ratio; seeds at LR, at HIGH_LR.
MODES = {
    "dense": (None, "none", "fp32", 1, 2, 2),
    "bf16": (None, "bf16", "fp32", 1, 1, 1),
    "int8": (None, "int8", "fp32", 1, 2, 2),
    "int8, feedback": ("feedback=1", "int8", "fp32", 1, 1, 0),
    "int4": (None, "int4", "fp32", 1, 2, 2),
    "randk, half in int8": (None, "randk", "int8", 0.5, 2, 0),
    "randk, half in int4": (None, "randk", "int4", 0.5, 2, 0),
    "randk, quarter in int4": (None, "randk", "int4", 0.25, 1, 0),
    "randk, half in int4, feedback 0.5": ("feedback=0.5", "randk", "int4", 0.5, 1, 0),
    "dct, all in int4": (None, "dct", "int4", 1, 1, 0),
    "dct, half in int8": (None, "dct", "int8", 0.5, 2, 0),
    "dct, low half in fp32": ("low", "dct", "fp32", 0.5, 1, 1),
    "dct, largest half in int8": ("largest", "dct", "int8", 0.5, 1, 2),
    "dct, largest half in int8, warm-up, feedback 0.5": (
        "largest,feedback=0.5,warmup=60",
        "dct",
        "int8",
        0.5,
        1,
        0,
    ),
    "largest half in int8": ("largest", "randk", "int8", 0.5, 1, 2),
    "largest half in int8, feedback 0.5": ("largest,feedback=0.5", "randk", "int8", 0.5, 1, 1),
    "largest half in int4": ("largest", "randk", "int4", 0.5, 1, 2),
    "largest quarter in int8": ("largest", "randk", "int8", 0.25, 1, 1),
    "drawn for each chunk, half in int8": ("drawn", "randk", "int8", 0.5, 1, 1),
    "the same places in all chunks, half in int8": ("common", "randk", "int8", 0.5, 1, 0),
    "PowerSGD, rank 16, warm-up": ("powersgd=16/60", None, None, None, 1, 1),
}


def loss():
    """Trains with each mode on 4 replicas; appends to loss.jsonl, skips what stands there."""
    runs = [("dense", 0, lr) for lr in SWEEP]
    for seed in (0, 1):
        runs += [(mode, seed, LR) for mode, (*_, seeds, _) in MODES.items() if seed < seeds]
        runs += [(mode, seed, HIGH_LR) for mode, (*_, seeds) in MODES.items() if seed < seeds]
    results = MEASURED / "loss.jsonl"
    lines = results.read_text().splitlines() if results.exists() else []
    done = {(line["mode"], line["seed"], line["lr"]) for line in map(json.loads, lines)}
    for run in dict.fromkeys(runs):
        if run not in done:
            line = train(*run)
            print(line, flush=True)
            with results.open("a") as file:
                file.write(json.dumps(line) + "\n")
    tabulate()


def train(mode, seed, lr):
    """One run of `loss`: its evaluation at the end and what it sent."""
    patch, compression, wire_dtype, keep_ratio, *_ = MODES[mode]
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
        model = write_model(Path(folder, "model"), **sizes)
        flags = ["-m", model, "-s", 64, "--global-batch-size", 8, "-b", 2]
        flags += ["--max-steps", 600, "--eval-sequences", 512, "--dtype", "fp32"]
        flags += ["--device", "cpu", "--seed", seed, "--lr", lr, "-e", "run", "--save-dir", folder]
        stage = STAGE_02
        if compression:
            stage = STAGE_04
            flags += ["--shard-size", 1, "--compression", compression]
            flags += ["--wire-dtype", wire_dtype, "--keep-ratio", keep_ratio]
        command = torchrun(["--standalone", "--nproc-per-node", 4], stage, patch, flags)
        run = subprocess.run(command, env=environment(), capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"{mode}: {run.stderr[-3000:]}")
        last = metrics(Path(folder, "run"))[600]
    ratio = last.get("comm/compression_ratio")
    if "PowerSGD sent" in run.stdout:
        ratio = float(run.stdout.split("PowerSGD sent 1/")[1].split()[0])
    return {"mode": mode, "seed": seed, "lr": lr, "loss": last["eval/loss"], "ratio": ratio}


def tabulate():
    """The tables and the plot of what `loss` measured so far."""
    lines = [json.loads(line) for line in (MEASURED / "loss.jsonl").read_text().splitlines()]
    lines.sort(key=lambda line: line["seed"])
    dense = {(x["seed"], x["lr"]): x["loss"] for x in lines if x["mode"] == "dense"}
    sweep = [[f"{lr:g}", f"{dense[0, lr]:.3f}"] for lr in SWEEP]
    report("learning-rate", ["learning rate", "final evaluation loss of dense, seed 0"], sweep)
    points, rows = [], []
    for mode in MODES:
        row = [mode, ""]
        for lr in (LR, HIGH_LR):
            runs = [x for x in lines if x["mode"] == mode and x["lr"] == lr]
            above = [100 * (x["loss"] / dense[x["seed"], lr] - 1) for x in runs]
            row.append(", ".join(f"{x['loss']:.3f}" for x in runs))
            row.append(f"{statistics.mean(above):+.1f} %" if runs else "")
            row[1] = f"1/{runs[0]['ratio']:.2f}" if runs else row[1]
            if runs and lr == LR:
                points.append((4 / runs[0]["ratio"], statistics.mean(above), mode, len(runs)))
        rows.append(row)
    head = ["mode", "bytes", f"final loss at {LR:g}, by seed", "above dense"]
    report("loss", [*head, f"at {HIGH_LR:g}", "above dense"], rows)
    draw_loss(points)


# The place of a label of the picture, seen from its point: pixels to the right and down, and which
# end of the text is there. Where nothing is said, it is to the right of its point.
LABELS = {
    "dense": (0, -12, "middle"),
    "bf16": (0, -12, "middle"),
    "int4": (-11, 4, "end"),
    "randk, half in int8": (-11, 4, "end"),
    "randk, half in int4": (-11, 7, "end"),
    "randk, half in int4, feedback 0.5": (0, -12, "middle"),
    "dct, all in int4": (11, -6, "start"),
    "dct, largest half in int8": (11, 4, "start"),
    "largest half in int8": (11, 9, "start"),
    "int8": (11, 10, "start"),
    "int8, feedback": (11, -2, "start"),
    "dct, half in int8": (34, -44, "start"),
    "the same places in all chunks, half in int8": (34, -64, "start"),
    "largest half in int4": (-11, 4, "end"),
    "drawn for each chunk, half in int8": (-11, 4, "end"),
    "PowerSGD, rank 16, warm-up": (14, 21, "end"),
}
# What the colors stand for: a mode has that of the first word that its name begins with.
FAMILIES = {
    "dct": ("rank3", "frequencies (dct)"),
    "largest": ("rank1", "the largest values"),
    "randk": ("rank2", "values at random places"),
    "drawn": ("rank2", ""),
    "the same": ("rank2", ""),
    "PowerSGD": ("muted", "PowerSGD, matrices of low rank"),
    "": ("rank0", "all values, in fewer bits"),
}


def draw_loss(points):
    """The final loss against the bytes. `points` are (bytes, % above dense, mode, runs)."""
    left, right, top, bottom = 52, WIDTH - 12, 44, 560
    highest = max(above for _, above, _, _ in points) + 0.6
    lowest = min(above for _, above, _, _ in points) - 0.6
    per_octave = (right - left) / math.log2(4.8 / 0.11)
    per_percent = (bottom - top) / (highest - lowest)

    def place(size, above):
        return left + per_octave * math.log2(size / 0.11), bottom - per_percent * (above - lowest)

    canvas = Canvas(612, label="Final loss of each way to compress, against the bytes it sends")
    canvas.text(0, 16, "Final loss above that of dense, in %", "text title")
    conditions = f"5.3 M parameters, 600 steps, 4 replicas, learning rate {LR:g}"
    canvas.text(right, 16, conditions, "muted", "end")
    for percent in range(0, math.floor(highest) + 1, 2):
        _, y = place(1, percent)
        canvas.line(left, y, right, y, "line" if percent == 0 else "idle")
        canvas.text(left - 10, y + 4, f"{percent:+d} %" if percent else "0 %", "muted", "end")
    for size in (4, 2, 1, 1 / 2, 1 / 4, 1 / 8):
        x, _ = place(size, 0)
        canvas.line(x, bottom, x, bottom + 5)
        number = f"{size:g}" if size >= 1 else f"1/{1 / size:g}"
        canvas.text(x, bottom + 20, number, "muted", "middle")
    canvas.line(left, bottom, right, bottom)
    title = "bytes for the gradient of one parameter (logarithmic)"
    canvas.text((left + right) / 2, bottom + 44, title, "text", "middle")

    for size, above, mode, runs in points:
        x, y = place(size, above)
        color = next(color for start, (color, _) in FAMILIES.items() if mode.startswith(start))
        dx, dy, anchor = LABELS.get(mode, (11, 4, "start"))
        if math.hypot(dx, dy) > 30:
            canvas.line(x, y, x + dx - 4, y + dy - 4)
        point(canvas, x, y, color, filled=runs > 1)
        canvas.text(x + dx, y + dy, mode, "text small", anchor)

    x, y = 480, top + 34
    for color, family in reversed(FAMILIES.values()):
        if family:
            point(canvas, x, y, color, filled=True)
            canvas.text(x + 14, y + 4.5, family)
            y += 24
    for filled, meaning in ((True, "mean of two seeds"), (False, "one seed")):
        point(canvas, x, y, "text", filled)
        canvas.text(x + 14, y + 4.5, meaning)
        y += 24
    canvas.save(MEASURED / "loss.svg")


def point(canvas, x, y, color, filled):
    if filled:
        canvas.box(x - 5, y - 5, 10, 10, color, radius=5)
    else:
        canvas.box(x - 4.3, y - 4.3, 8.6, 8.6, color, outline=True, radius=4.3)

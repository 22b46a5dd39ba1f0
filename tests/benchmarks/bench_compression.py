"""Measures rung 04: bytes, slow links, encoding, loss. Controls and what was tried and left out."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_common import (
    MEASURED,
    RUNG_02,
    RUNG_04,
    environment,
    report,
    run_on,
    torchrun,
    two_nodes,
    write_model,
)
from conftest import load, metrics

# How often the hook is called in a step of the models here.
BLOCKS_AND_ROOT = 6 + 1


def silent(module, _):
    """Gradients stay at home: what else a run sends."""

    module.average = lambda gradient, **how: None


def each(choose):
    """Makes a patch: places that `choose` chooses for each chunk, in the place of common ones."""

    def patch(module, _):
        calls, dense = Counter(), module.average

        def average(gradient, *, group, mode, wire, chunk, places, lap, traffic):
            step = 1 + calls["all"] // BLOCKS_AND_ROOT
            calls["all"] += 1
            if mode == "none":
                return dense(gradient, group, mode, wire, chunk, places, lap, traffic)
            lap("backward")
            traffic["dense"] += 2 * (group.size() - 1) / group.size() * gradient.nbytes
            rows = F.pad(gradient, (0, -len(gradient) % chunk)).view(-1, chunk)
            if mode == "dct":
                rows = rows @ module.dct_basis(chunk, gradient.device).T
            mask = choose(rows, len(places), step, group, lap, traffic)
            module.chosen = mask.flatten().nonzero().flatten()
            mean = module.exchange(rows.flatten()[module.chosen], group, wire, lap, traffic)
            rows = torch.zeros_like(rows).flatten().index_copy_(0, module.chosen, mean)
            rows = rows.view(-1, chunk)
            if mode == "dct":
                rows = rows @ module.dct_basis(chunk, gradient.device)
            gradient.copy_(rows.flatten()[: len(gradient)])
            lap("encode")

        module.average = average

    return patch


def largest(rows, k, step, group, lap, traffic):
    """Where one replica has its `k` largest of each chunk, which it tells by a bit a value. The
    replicas lead in turn. Source: CLT-k of ScaleCom, arXiv:2104.11125."""
    mask, leader = torch.zeros_like(rows, dtype=torch.uint8), step % group.size()
    if group.rank() == leader:
        mask.scatter_(1, rows.abs().topk(k, sorted=False).indices, 1)
    powers = 2 ** torch.arange(8, dtype=torch.uint8)
    packed = (mask.view(-1, 8) * powers).sum(1, dtype=torch.uint8)
    lap("encode")
    dist.broadcast(packed, group=group, group_src=leader)
    lap("travel")
    traffic["sent"] += (group.size() - 1) / group.size() * packed.nbytes
    return (packed[:, None] & powers).view_as(rows)


DRAW = torch.Generator().manual_seed(0)


def lowest(rows, k, step, group, lap, traffic):
    """The classical truncation: the lowest frequencies, always the same ones."""
    return torch.arange(rows.shape[1]).expand_as(rows) < k


def common(rows, k, step, group, lap, traffic):
    """The same places for all chunks."""
    places = torch.randperm(rows.shape[1], generator=torch.Generator().manual_seed(step))
    return torch.isin(torch.arange(rows.shape[1]), places[:k]).expand_as(rows)


def drawn(rows, k, step, group, lap, traffic):
    """Places drawn anew for each chunk."""
    chosen = torch.rand(rows.shape, generator=DRAW).topk(k).indices
    return torch.zeros(rows.shape).scatter_(1, chosen, 1)


def feedback(module, decay):
    """What a rank did not send, times `decay`, is added to its next gradient of the same module."""
    residuals, own = {}, {}
    average, exchange = module.average, module.exchange
    hook = module.fsdp.FSDPModule.set_all_reduce_hook

    def hook_with_key(self, function):
        hook(self, partial(function, key=id(self)))

    def exchange_and_note(values, group, wire, lap, traffic):
        padded = F.pad(values, (0, -len(values) % 256))
        own["values"] = module.from_bytes(module.to_bytes(padded, wire), wire)[: len(values)]
        return exchange(values, group, wire, lap, traffic)

    def average_with_feedback(gradient, *, key, mode, chunk, places, **how):
        if mode == "none":
            return average(gradient, mode=mode, chunk=chunk, places=places, **how)
        if key in residuals:
            gradient += float(decay) * residuals[key]
        given = gradient.clone()
        average(gradient, mode=mode, chunk=chunk, places=places, **how)
        sent = own["values"]
        if mode in ("dct", "randk"):
            size = -(-len(given) // chunk) * chunk
            row = torch.arange(size // chunk)[:, None]
            shifted = row * chunk + (places + (row * 2654435761 >> 16)) % chunk
            chosen = getattr(module, "chosen", shifted.flatten())
            sent = torch.zeros(size).index_copy_(0, chosen, sent).view(-1, chunk)
        if mode == "dct":
            sent = sent @ module.dct_basis(chunk, gradient.device)
        residuals[key] = given - sent.flatten()[: len(given)]

    module.fsdp.FSDPModule.set_all_reduce_hook = hook_with_key
    module.exchange, module.average = exchange_and_note, average_with_feedback


def warmup(module, steps):
    """Dense for the first `steps`."""
    average, calls = module.average, Counter()

    def dense_first(gradient, *, mode, **how):
        calls["all"] += 1
        average(
            gradient, mode="none" if calls["all"] <= BLOCKS_AND_ROOT * int(steps) else mode, **how
        )

    module.average = dense_first


def power_sgd(module, value):
    """PyTorch's PowerSGD hook on rung 02: rank and dense steps before it, as `16/60`.

    Source: Vogels et al., arXiv:1905.13727."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    rank, warmup = map(int, value.split("/"))
    how = {"matrix_approximation_rank": rank, "start_powerSGD_iter": warmup}
    state = power.PowerSGDState(None, **how)
    wrap, close = module.DistributedDataParallel, module.RunLog.close

    def wrapped(model, **how):
        # One bucket: those of several mix up their collectives on gloo, and the run aborts.
        model = wrap(model, bucket_cap_mb=10_000, **how)
        model.register_comm_hook(state, power.powerSGD_hook)
        return model

    def close_and_say(log):
        module.say(f"PowerSGD sent 1/{state.compression_stats()[0]:.2f} of the values")
        close(log)

    module.DistributedDataParallel, module.RunLog.close = wrapped, close_and_say


def fp16_hook(module, _):
    """PyTorch's hook on rung 02 that casts gradients to fp16."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    wrap = module.DistributedDataParallel

    def wrapped(model, **how):
        model = wrap(model, **how)
        model.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
        return model

    module.DistributedDataParallel = wrapped


PATCHES = {"silent": silent, "warmup": warmup, "feedback": feedback}
PATCHES |= {"largest": each(largest), "low": each(lowest)}
PATCHES |= {"common": each(common), "drawn": each(drawn)}
PATCHES |= {"powersgd": power_sgd, "fp16": fp16_hook}


def small_steps(folder, steps):
    """Flags of a run of many parameters on few tokens: the link is measured and not the CPU."""
    sizes = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6}
    flags = ["-m", write_model(Path(folder), **sizes), "-s", 64, "--global-batch-size", 8, "-b", 4]
    flags += ["--max-steps", steps, "--eval-sequences", 1, "--log-freq", 1, "--ckpt-freq", 10**9]
    return [*flags, "--device", "cpu"]


# Ways to compress: --compression, --wire-dtype, --dct-keep.
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
    mode, wire_dtype, keep = COMPRESSIONS[way]
    flags = ["--shard-size", 1, "--compression", mode, "--wire-dtype", wire_dtype]
    return [*flags, "--keep", keep]


def wire():
    """Payload per step on the interface, less that of a run without gradients, against the log."""
    steps = 6
    rows = []
    with tempfile.TemporaryDirectory() as folder, two_nodes() as names:
        flags = small_steps(folder, steps)
        quiet = statistics.mean(run_on(names, RUNG_04, "silent", [*flags, *flags_of("none")])[1])
        for way in COMPRESSIONS:
            lines, sent = run_on(names, RUNG_04, None, [*flags, *flags_of(way)])
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
DDP = "rung 02, DDP in fp32"


def link():
    """Time of a step on slow links: median over steps, ratios to DDP on the same link."""
    modes = {DDP: (RUNG_02, None, ())}
    modes |= {"rung 02, PyTorch's fp16 hook": (RUNG_02, "fp16", ())}
    modes |= {"rung 02, PyTorch's PowerSGD, rank 16": (RUNG_02, "powersgd=16/2", ())}
    modes |= {f"rung 04, {way}": (RUNG_04, None, flags_of(way)) for way in COMPRESSIONS}
    seconds = {}
    for mbit in SPEEDS:
        with tempfile.TemporaryDirectory() as folder, two_nodes(mbit) as names:
            for mode, (rung, patch, flags) in modes.items():
                lines, _ = run_on(names, rung, patch, [*small_steps(folder, 8), *flags])
                times = [line["time/total_ms"] / 1000 for line in lines[3:]]
                seconds[mode, mbit] = statistics.median(times)
                print(mode, mbit, round(seconds[mode, mbit], 3), flush=True)
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


def encode():
    """GB/s of fp32 gradients through encoder and decoder, and through a plain copy."""
    module = load(RUNG_04)
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

    seconds = {}
    for way in ["copy", *list(COMPRESSIONS)[1:]]:
        times = []
        for _ in range(12):
            laps.clear()
            if way == "copy":
                lap("backward")
                gradient.clone()
                lap("encode")
            else:
                mode, wire_dtype, keep = COMPRESSIONS[way]
                places = torch.randperm(256)[: round(256 * keep)].to(device)
                how = (mode, wire_dtype, 256, places, lap, Counter())
                module.average(gradient.clone(), dist.group.WORLD, *how)
            spent = [
                now - before
                for (_, before), (phase, now) in zip(laps, laps[1:], strict=False)
                if phase == "encode"
            ]
            times.append(sum(spent))
        seconds[way] = statistics.median(times[2:])
    rows = []
    for way, spent in seconds.items():
        speed = gradient.nbytes / spent / 1e9
        rows.append([way, f"{speed:.2f}", f"{spent / seconds['copy']:.1f}"])
    name = torch.cuda.get_device_name() if device.type == "cuda" else "one CPU core"
    report(f"encode-{device.type}", [f"mode, {name}", "GB/s of fp32", "times a copy"], rows)
    dist.destroy_process_group()


# The best learning rate of dense, as far as the sweep shows, and one above it, where modes rank
# otherwise: a mode that takes smaller steps gains there.
LR, HIGH_LR = 5e-4, 1e-3
SWEEP = (2.5e-4, 3.5e-4, LR, 7e-4, HIGH_LR)
# Name: patches (see above), --compression, --wire-dtype, --keep; seeds at LR, seeds at HIGH_LR.
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
    patch, compression, wire_dtype, keep, *_ = MODES[mode]
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
        model = write_model(Path(folder, "model"), **sizes)
        flags = ["-m", model, "-s", 64, "--global-batch-size", 8, "-b", 2]
        flags += ["--max-steps", 600, "--eval-sequences", 512, "--dtype", "fp32"]
        flags += ["--device", "cpu", "--seed", seed, "--lr", lr, "-e", "run", "--save-dir", folder]
        rung = RUNG_02
        if compression:
            rung = RUNG_04
            flags += ["--shard-size", 1, "--compression", compression]
            flags += ["--wire-dtype", wire_dtype, "--keep", keep]
        command = torchrun(["--standalone", "--nproc-per-node", 4], rung, patch, flags)
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
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    from matplotlib import pyplot

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
                points.append((runs[0]["ratio"], statistics.mean(above), mode))
        rows.append(row)
    head = ["mode", "bytes", f"final loss at {LR:g}, by seed", "above dense"]
    report("loss", [*head, f"at {HIGH_LR:g}", "above dense"], rows)
    front = [p for p in points if not any(q[0] >= p[0] and q[1] < p[1] for q in points)]
    front.sort()
    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    axes.plot([p[0] for p in front], [p[1] for p in front], color="tab:blue", zorder=1)
    for ratio, above, mode in points:
        color = "tab:blue" if (ratio, above, mode) in front else "tab:gray"
        axes.scatter(ratio, above, color=color, zorder=2)
        axes.annotate(mode, (ratio, above), (5, 4), textcoords="offset points", fontsize=8)
    axes.set(xscale="log", xlabel="times fewer bytes than fp32", ylabel="final loss above dense, %")
    axes.set_title("5.3 M parameters, 600 steps, 4 replicas. Blue: the Pareto front")
    figure.tight_layout()
    figure.savefig(MEASURED / "loss.svg", metadata={"Date": None})

"""Measures stage 04: bytes, slow links, loss."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from bench_common import (
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
from conftest import load, metrics


def silent(module, _):
    """Gradients stay at home: what else a run sends."""
    module.ReplicaAverage.__call__ = lambda self, owner, gradient: None


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


PATCHES = {"silent": silent, "powersgd": power_sgd, "fp16": fp16_hook}


def small_steps(folder, steps):
    """Flags of a run of many parameters on few tokens: the link is measured and not the CPU."""
    sizes = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6}
    flags = ["-m", write_model(Path(folder), **sizes), "--from-scratch", "-d", "dummy"]
    flags += ["-s", 64, "--global-batch-size", 8, "-b", 4]
    flags += ["--max-steps", steps, "--eval-sequences", 1, "--log-freq", 1, "--ckpt-freq", 10**9]
    return [*flags, "--device", "cpu"]


COMPRESSIONS = ("none", "dct", "int8")


def flags_of(mode):
    return ["--shard-size", 1, "--compression", mode]


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
    """Time of a step on slow links: median over steps, ratios to DDP on the same link."""
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
                ms = statistics.median(line["time/total_ms"] for line in lines[3:])
                seconds[mode, mbit] = ms / 1000
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
    """GB/s of fp32 gradients through the hook of a replica that is alone, and of a copy of them.

    With one replica nothing is sent, and what is left is the encoding and decoding. The gradient is
    that of a block: of the model of `link` on a CPU, of a shard of Llama-3-8B's on a GPU. A larger
    one is slower on a CPU, since memory for its parts is fetched from the system each time."""
    module = load(STAGE_04)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    gradient = torch.randn(27_264_000 if device.type == "cuda" else 1_770_240, device=device)

    def now():
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def spent(work):
        """Seconds, the median of forty."""
        times = []
        for _ in range(42):
            given = gradient.clone()
            start = now()
            work(given)
            times.append(now() - start)
        return statistics.median(times[2:])

    copy = spent(torch.empty_like(gradient).copy_)
    rows = [["copy", f"{gradient.nbytes / copy / 1e9:.2f}", "1.0"]]
    for mode in COMPRESSIONS[1:]:
        average = module.ReplicaAverage(dist.group.WORLD, mode, device)
        seconds = spent(partial(average, "a module"))
        rows.append([mode, f"{gradient.nbytes / seconds / 1e9:.2f}", f"{seconds / copy:.1f}"])
        print(rows[-1], flush=True)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "one CPU core"
    report(f"encode-{device.type}", [f"mode, {name}", "GB/s of fp32", "times a copy"], rows)
    dist.destroy_process_group()


# The best learning rate of dense, as far as the sweep shows, and one above it, where modes rank
# otherwise: a mode that takes smaller steps gains there.
LR, HIGH_LR = 2e-3, 4e-3
SWEEP = (5e-4, 1e-3, LR, HIGH_LR, 8e-3)
# Name: --compression, or None for a patch of stage 02; seeds at LR, at HIGH_LR.
MODES = {
    "dense": ("none", 2, 2),
    "int8": ("int8", 2, 2),
    "dct": ("dct", 2, 1),
    "PowerSGD, rank 16, warm-up": (None, 1, 1),
}


def loss():
    """Trains with each mode on 4 replicas; appends to loss.jsonl, skips what stands there."""
    runs = [("dense", 0, lr) for lr in SWEEP]
    for seed in (0, 1):
        runs += [(mode, seed, LR) for mode, (_, seeds, _) in MODES.items() if seed < seeds]
        runs += [(mode, seed, HIGH_LR) for mode, (_, _, seeds) in MODES.items() if seed < seeds]
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
    compression = MODES[mode][0]
    stage, patch, flags = STAGE_02, "powersgd=16/60", []
    if compression:
        stage, patch, flags = STAGE_04, None, flags_of(compression)
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
        model = write_model(Path(folder, "model"), vocab_size=1024, **sizes)
        flags += ["-m", model, "--from-scratch", "-s", 64, "--global-batch-size", 8, "-b", 2]
        flags += ["--max-steps", 600, "--eval-sequences", 512, "--dtype", "fp32"]
        flags += ["--device", "cpu", "--seed", seed, "--lr", lr, "-e", "run", "--save-dir", folder]
        command = torchrun(["--standalone", "--nproc-per-node", 4], stage, patch, flags)
        run = subprocess.run(command, env=environment(), capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"{mode}: {run.stderr[-3000:]}")
        last = metrics(Path(folder, "run"))[600]
    sent = last.get("comm/bytes_per_step")
    ratio = None
    if "PowerSGD sent" in run.stdout:
        ratio = float(run.stdout.split("PowerSGD sent 1/")[1].split()[0])
    line = {"mode": mode, "seed": seed, "lr": lr, "loss": last["eval/loss"]}
    return line | {"ratio": ratio, "bytes": sent}


def tabulate():
    """The tables of what `loss` measured so far."""
    lines = [json.loads(line) for line in (MEASURED / "loss.jsonl").read_text().splitlines()]
    lines.sort(key=lambda line: line["seed"])
    dense = {(x["seed"], x["lr"]): x["loss"] for x in lines if x["mode"] == "dense"}
    all_bytes = next(x["bytes"] for x in lines if x["mode"] == "dense" and "bytes" in x)
    sweep = [[f"{lr:g}", f"{dense[0, lr]:.3f}"] for lr in SWEEP]
    report("learning-rate", ["learning rate", "final evaluation loss of dense, seed 0"], sweep)
    rows = []
    for mode in MODES:
        row = [mode, ""]
        for lr in (LR, HIGH_LR):
            runs = [x for x in lines if x["mode"] == mode and x["lr"] == lr]
            above = [100 * (x["loss"] / dense[x["seed"], lr] - 1) for x in runs]
            row.append(", ".join(f"{x['loss']:.3f}" for x in runs))
            row.append(f"{statistics.mean(above):+.1f} %" if runs else "")
            if runs:
                row[1] = f"1/{runs[0]['ratio'] or all_bytes / runs[0]['bytes']:.2f}"
        rows.append(row)
    head = ["mode", "bytes", f"final loss at {LR:g}, by seed", "above dense"]
    report("loss", [*head, f"at {HIGH_LR:g}", "above dense"], rows)

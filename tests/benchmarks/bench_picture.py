"""Stages 01 to 05 side by side: losses, speed, memory, and bytes that are sent."""

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_common import (
    STAGE_01,
    STAGE_02,
    STAGE_03,
    STAGE_04,
    STAGE_05,
    environment,
    report,
    run_on,
    two_nodes,
    write_model,
)
from bench_speed import LLAMA_25M
from conftest import ROOT, metrics

STEPS = 40
# Name in the table: stage, flags.
RUNS = {
    "01": (STAGE_01, []),
    "02": (STAGE_02, []),
    "03": (STAGE_03, []),
    "04, int8, the default": (STAGE_04, ["--shard-size", 1]),
    "04, none": (STAGE_04, ["--shard-size", 1, "--compression", "none"]),
    "04, dct": (STAGE_04, ["--shard-size", 1, "--compression", "dct"]),
    "05, int8, the default": (STAGE_05, ["--shard-size", 1]),
}


def measure(names, stage, flags):
    """Lines of one run by step, and MB that a node sends per step: what 15 steps send beyond 5. A
    run's start and end send too, and the sample of stage 03 not little."""
    if stage == STAGE_01:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, ROOT / stage / "train-llm.py", *flags]
            command += ["-e", "run", "--save-dir", folder]
            out = subprocess.DEVNULL
            subprocess.run(map(str, command), env=environment(), check=True, stdout=out)
            return metrics(Path(folder, "run")), 0.0
    lines, _ = run_on(names, stage, None, flags)
    few, many = (run_on(names, stage, None, [*flags, "--max-steps", n])[1] for n in (5, 15))
    sent = (statistics.mean(many) - statistics.mean(few)) / 10
    return {line["step"]: line for line in lines}, sent / 1e6


def picture():
    """A Llama of 25 M parameters on Python's documentation, two nodes of one core each."""
    results = {}
    with tempfile.TemporaryDirectory() as folder, two_nodes() as names:
        common = ["-m", write_model(Path(folder, "model"), **LLAMA_25M), "-s", 64, "-b", 4]
        common += ["--global-batch-size", 8, "--max-steps", STEPS, "--log-freq", 1]
        common += ["--eval-sequences", 1, "--ckpt-freq", 10**9, "--device", "cpu"]
        for name, (stage, flags) in RUNS.items():
            results[name] = measure(names, stage, [*common, *flags])
            print(name, results[name][0][STEPS]["train/loss"], flush=True)
    columns = {"tokens/s": [], "state of a rank, MB": [], "sent per step, MB": []}
    rows = []
    for name, (lines, sent) in results.items():
        times = [line["time/total_ms"] for step, line in lines.items() if step > 5]
        rate = 8 * 64 / statistics.median(times) * 1000
        numbers = [rate, 1000 * lines[STEPS]["memory/state_gb"], sent]
        for column, number in zip(columns.values(), numbers, strict=True):
            column.append(number)
        losses = [f"{lines[step]['train/loss']:.4f}" for step in (1, 20, STEPS)]
        rows.append([name, *losses, *(f"{number:,.0f}" for number in numbers)])
    head = ["stage", *(f"loss at step {step}" for step in (1, 20, STEPS)), *columns]
    report("picture", head, rows)

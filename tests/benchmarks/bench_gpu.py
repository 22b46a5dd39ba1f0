"""GPUs: tokens per second, MFU and peak memory of the stages, on models with random weights.

gpu.sh and gpu-2.sh call each within ten minutes. So the table is written after each run, those that
matter most come first, and no run begins when the time is nearly over."""

import importlib.util
import sys
import tempfile
import time

import torch
import transformers
from bench_common import (
    GPU,
    STAGE_01,
    STAGE_02,
    STAGE_03,
    STAGE_04,
    STAGE_07,
    STAGE_08,
    STAGE_09,
    STAGE_10,
    report,
)
from bench_speed import run_peer, run_stage, setting

import plan

SECONDS = 500  # after which no run begins: each takes about a minute
LLAMA, QWEN = "Llama-3.2-1B, 2048 tokens", "Qwen3-0.6B, 2048 tokens"
MIXTURE = "a mixture of 1.4 B, 2048 tokens"
ON_ONE = [
    (LLAMA, STAGE_01, "--compile"),
    (LLAMA, STAGE_01, "--no-compile"),
    (LLAMA, STAGE_01, "--activation-checkpointing"),
    (QWEN, STAGE_01, "--compile"),
    (LLAMA, STAGE_02, ""),
    (LLAMA, STAGE_03, ""),
    (LLAMA, STAGE_04, "--compression none"),
    (QWEN, STAGE_01, "--no-compile"),
    (QWEN, STAGE_01, "--activation-checkpointing"),
]
if importlib.util.find_spec("flash_attn"):
    ON_ONE.insert(2, (LLAMA, STAGE_01, "--attn flash_attention_2"))
ON_ALL = [
    (LLAMA, STAGE_02, ""),
    (LLAMA, STAGE_03, ""),
    (LLAMA, STAGE_03, "--no-reshard-after-forward"),
    (LLAMA, STAGE_04, "--compression none --shard-size 1"),
    (LLAMA, STAGE_04, "--compression int8 --shard-size 1"),
    (LLAMA, STAGE_07, "--tensor-size 2"),
    (LLAMA, STAGE_08, "--stages 2"),
    (LLAMA, STAGE_09, "--context-size 2"),
    (MIXTURE, STAGE_03, ""),
    (MIXTURE, STAGE_10, "--expert-size 2"),
]


def gpu():
    """The stages with one process, and the memory of 01 against chapter 01's formulas."""
    measure("gpu", ON_ONE, 1)


def peers():
    """Stage 01 against the bare loop and transformers.Trainer, compiled and not."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        how = setting(folder, LLAMA)
        for compiled in (True, False):
            flag = "--compile" if compiled else "--no-compile"
            own = run_stage(how, STAGE_01, 1, flag, patch="unsaved")["tokens_per_second"]
            for name, peer in (("the bare loop", "bare"), ("Trainer", "trainer")):
                speed = run_peer(how, peer, compile=compiled)["tokens_per_second"]
                row = [LLAMA, "compiled" if compiled else "not compiled", name]
                rows.append([*row, f"{own:,.0f}", f"{speed:,.0f}", f"{own / speed:.2f}"])
                head = ["model", "", "against", "stage 01, tokens/s", "it, tokens/s", "ratio"]
                report("gpu-peers", head, rows)


def all_gpus():
    """The stages with a process on each GPU, against stage 01 on one of them. Stage 10 has a model
    of its own, with stage 03 on all GPUs to compare with."""
    number = torch.cuda.device_count()
    if number < 2:
        sys.exit("benchmark.py: error: gpu-2 needs two GPUs")
    measure("gpu-2", ON_ALL, number, [(LLAMA, STAGE_01, "")])


def mfu_of(result):
    """The share of the GPU's peak, in words."""
    peak = plan.peak_flops(torch.cuda.get_device_name()) if GPU else 0
    tflops = result.get("throughput/tflops_per_device")
    return f"{1e12 * tflops / peak:.1%}" if peak and tflops else "–"


def measure(name, runs, processes, on_one=()):
    end, rows, speed_of_one = time.monotonic() + SECONDS, [], {}
    for run in [*on_one, *runs]:
        model, stage, flags = run
        if time.monotonic() > end:
            print(f"no time is left for {run}", flush=True)
            continue
        number = 1 if run in on_one else processes
        with tempfile.TemporaryDirectory() as folder:
            how = setting(folder, model)
            result = run_stage(how, stage, number, *flags.split(), patch="unsaved")
            config = transformers.AutoConfig.from_pretrained(how["model"])
        speed = result["tokens_per_second"]
        one = speed_of_one.setdefault(model, speed / number)  # the first run of a model
        row = [model, stage, flags, number, f"{speed:,.0f}", f"{speed / number / one:.2f}"]
        row.append(mfu_of(result))
        row.append(f"{result['memory/peak_gb']:.1f}")
        formula = "–"
        if stage == STAGE_01 and "--no-compile" not in flags:
            tokens = how["batch_size"] * how["seq_length"]
            sizes = plan.sizes_of(config, how["seq_length"])
            recompute = "--activation-checkpointing" in flags
            parts = plan.memory_of_a_whole_copy(sizes, tokens, recompute).values()
            formula = f"{sum(parts) / 1e9:.1f}"
        rows.append([*row, formula])
        head = ["model", "stage", "flags", "GPUs", "tokens/s", "a GPU, the first row = 1", "MFU"]
        report(name, [*head, "peak, GB", "by chapter 01's formula, GB"], rows)


def unsaved(module, _):
    """Does not save 20 GB in each run, nor sample a text."""
    module.save_checkpoint = module.save_final_model = lambda *_: None
    module.sample = lambda *_: ("", "")


PATCHES = {"unsaved": unsaved}

"""The tables of chapters 05, 07 and 08 that nobody measured: scale.py at work."""

from copy import deepcopy
from types import SimpleNamespace

import scale
import torch
import transformers
from bench_common import STAGE_08, report
from conftest import load

# Model, GPUs, GPUs of a replica.
LAYOUTS = [
    ("Llama-3.2-1B", 32, 8),
    ("Llama-3.2-1B", 512, 8),
    ("Llama-3-8B", 32, 8),
    ("Llama-3-8B", 512, 8),
    ("Llama-3-70B", 32, 32),
    ("Llama-3-70B", 512, 64),
]
# An integer, and its share of a block's scale.
BYTES_A_VALUE = {"int8": 1 + 4 / 256}


def on_paper():
    """The tables of chapter 05 for GPUs in nodes of 8. A GPU takes 8192 tokens a step."""
    tokens, length = 8192, 1024
    rows = []
    for name, shards in dict.fromkeys((name, shards) for name, _, shards in LAYOUTS):
        size = scale.sizes(name, shards, tokens)
        parts = ["state", "gathered", "logits", "activations", "checkpointed"]
        parts += ["total", "total, checkpointed", "kept"]
        rows.append([name, shards, *[f"{size[part] / 1e9:,.1f}" for part in parts]])
    head = ["GB on each GPU", "shards", "state", "gathered", "logits", "activations"]
    head += ["with checkpointing", "total", "total with checkpointing"]
    report("scale-memory", [*head, "`--no-reshard-after-forward` adds"], rows)
    rows = []
    for name, gpus, shards in LAYOUTS:
        row = [name, f"{gpus // 8} × 8", shards]
        # Shards within a node speak over NVLink, those across nodes over the adapters as well.
        links = scale.NVLINK if shards <= 8 else scale.RING_OVER_NODES, scale.NETWORK
        fits = scale.sizes(name, shards, tokens)["total"] < 80e9
        for ratio in (1, 4 / BYTES_A_VALUE["int8"]):
            how = shards, gpus, tokens, length, ratio, links, 1 if fits else 4 / 3
            inner, outer, seconds = scale.traffic(name, *how)
            row += [f"{inner / 1e9:.1f}"] if ratio == 1 else []
            row += [f"{outer / 1e9:.2f}"]
            row += [f"{1000 * s:,.0f}" for s in (seconds[:2] if ratio == 1 else [])]
            row += [f"{1000 * seconds[2]:,.0f}", f"{1000 * seconds[3]:,.0f}"]
        rows.append(row)
    head = ["model", "GPUs", "shards", "GB sent between shards", "GB sent between replicas"]
    head += ["compute, ms", "shards, ms", "replicas, ms", "step, ms"]
    head += ["GB in int8", "replicas in int8, ms", "step in int8, ms"]
    report("scale-step", head, rows)
    split_over_a_group()
    split_over_four_nodes()


def split_over_a_group():
    """The table of chapter 07: a long sequence in bf16, 8 GPUs in tensor groups of n."""
    tokens, gpus = 131_072, 8
    config = scale.config_of("Llama-3-8B")
    n, block = scale.parameters(config)
    layers, h = config.num_hidden_layers, config.hidden_size
    rows = []
    for ranks in (1, 2, 4, 8):
        of_a_block = tokens * scale.activation_bytes(config, 2, ranks)
        inputs = layers * tokens * 2 * h / ranks
        last_norm = tokens * scale.last_norm_bytes(config, ranks)
        logits = tokens * scale.logit_bytes(config, ranks)
        state = scale.state_bytes(n, gpus)
        model = (state, (n - layers * block) / ranks, block / ranks)
        output_layer = 2 * config.vocab_size * h / ranks
        total = scale.peak_bytes(*model, inputs, of_a_block, logits + last_norm, output_layer)
        parts = [layers * of_a_block, inputs + of_a_block, logits, state, total]
        rows.append([ranks, *[f"{size / 1e9:.1f}" for size in parts]])
    head = ["GB on each GPU, n", "activations", "activations with checkpointing"]
    head += ["logits and their gradient", "state", "peak with checkpointing"]
    report("scale-tensor", head, rows)


def split_over_four_nodes():
    """The table of chapter 08: a step of 128 sequences on 4 nodes of 8 GPUs, in four ways."""
    name, sequences, length = "Llama-3-70B", 128, 8192
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(scale.config_of(name))
    stages = [SimpleNamespace(index=i, last=3, is_first=i == 0, is_last=i == 3) for i in range(4)]
    keep_stage = load(STAGE_08).keep_stage
    blocks_per_stage = []
    for stage in stages:
        copy = deepcopy(model)
        blocks_per_stage.append(len(keep_stage(copy, list(copy.model.layers), stage)))
    ways = {
        "03": "32 shards",
        "04": "4 replicas of 8 shards",
        "07": "tensor groups of 8, 4 shards",
        "08": f"4 pipeline stages of {' + '.join(map(str, blocks_per_stage))} blocks, 8 shards",
    }
    rows = []
    for stage, way in ways.items():
        how = (stage, name, sequences, length, blocks_per_stage)
        step = scale.step_on_four_nodes(*how)
        row = [stage, way, f"{step['memory'] / 1e9:,.0f}"]
        row += [f"{step[which] / 1e9:,.0f}" for which in ("within", "between")]
        for speed in (scale.FAST_NODE, scale.SLOW_NODE):
            row.append(f"{step['seconds'](speed):,.0f}" if step["memory"] < 80e9 else "–")
        rows.append(row)
    head = ["stage", "split over 4 × 8 GPUs", "memory of the largest GPU, GB"]
    head += ["sent by a GPU within its machine, GB", "sent by a machine, GB"]
    head += ["step, s, 400 Gbit/s for each GPU", "step, s, 100 Gbit/s for each machine"]
    report("scale-split", head, rows)

"""The tables of chapter 05 that nobody measured: scale.py at work."""

import scale
from bench_common import report

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
        # Shards within a node speak over NVLink, those across nodes over the network.
        links = scale.NVLINK if shards <= 8 else scale.NETWORK, scale.NETWORK
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

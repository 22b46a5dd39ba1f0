"""The tables of chapters 05, 07 and 08 that nobody measured: the formulas of plan.py at work."""

import scale
from bench_common import STAGE_03, STAGE_05, STAGE_07, STAGE_08, report

import plan

# Model, machines of 8 GPUs, GPUs of a replica.
LAYOUTS = [
    ("Llama-3.2-1B", 4, 8),
    ("Llama-3.2-1B", 64, 8),
    ("Llama-3-8B", 4, 8),
    ("Llama-3-8B", 64, 8),
    ("Llama-3-70B", 4, 32),
    ("Llama-3-70B", 64, 64),
]
# An integer, and its share of a block's scale.
BYTES_A_VALUE = {"int8": 1 + 4 / 256}
# Gbit/s of a machine: with an adapter for each of its 8 GPUs, and with one slower one for all.
FAST, SLOW = 8 * 400, 100


# Cards and their numbers in the table of GUIDE.md, and its models.
CARDS = ("RTX 4090", "L40S", "H100")
GPUS_AND_NODES = {1: (1, 1), 4: (4, 1), 8: (8, 1), 16: (8, 2)}
FINE_TUNED = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B")


def on_paper():
    report("fits", *what_fits())
    memory_of_shards()
    steps_of_replicas()
    split_over_a_group()
    split_over_four_machines()


def what_fits():
    """The table of GUIDE.md: the fastest stage that fits, with sequences of 4096 tokens. The GPUs
    are CARDS."""
    rows = []
    for number, (gpus, nodes) in GPUS_AND_NODES.items():
        for card in CARDS:
            row = [f"{number} × {plan.GPUS[card][0]} GB"]
            for name in FINE_TUNED:
                flags = ["--gpu", card, "--gpus", str(gpus), "--nodes", str(nodes), "-s", "4096"]
                args = plan.parse_args(flags)
                best = plan.plans_of(scale.model_of(name, args.seq_length), args)[0]
                row.append(short(best) if best["fits"] else "–")
            rows.append(row)
    return ["GPUs", *FINE_TUNED], rows


def short(best):
    """The number of a stage, and c with activation checkpointing, o with offloading."""
    letters = "c" * ("--activation-checkpointing" in best["flags"])
    letters += "o" * ("--cpu-offload" in best["flags"])
    return best["stage"][:2] + letters


def memory_of_shards():
    """The first table of chapter 05: micro-batches of 8192 tokens."""
    tokens, rows = 8192, []
    for name, shards in dict.fromkeys((name, shards) for name, _, shards in LAYOUTS):
        model = scale.model_of(name, tokens)
        split = plan.Split(STAGE_05, shards=shards)
        for recompute in (False, True):
            parts = scale.memory(model, tokens, recompute, split)
            state = parts["parameters"] + parts["gradients"] + parts["moments"]
            row = [name, shards, "yes" if recompute else "no", state]
            row += [parts["copies"], parts["activations"], parts["logits"], sum(parts.values())]
            row.append((plan.BF16 + plan.FP32) * model.num_parameters)
            rows.append([*row[:3], *[f"{size / 1e9:.1f}" for size in row[3:]]])
    head = ["GB on each GPU", "shards", "checkpointing", "state"]
    head += ["gathered parameters and their gradients", "activations", "logits", "all"]
    report("scale-memory", [*head, "`--no-reshard-after-forward` keeps"], rows)


def steps_of_replicas():
    """The second table of chapter 05: each GPU takes 8 sequences of 1024 tokens in a step."""
    batch_size, length, rows = 8, 1024, []
    for name, nodes, shards in LAYOUTS:
        model = scale.model_of(name, length)
        split = plan.Split(STAGE_05, shards=shards)
        parts = scale.memory(model, batch_size * length, False, split)
        recompute = sum(parts.values()) > 80e9
        given = {"nodes": nodes, "seq_length": length, "global_batch_size": batch_size * 8 * nodes}
        sent, seconds, step = scale.step(model, split, recompute, batch_size, batch_size, **given)
        row = [name, f"{nodes} × 8", shards, f"{sent['FSDP'] / 1e9:.1f}"]
        row += [f"{sent['averages'] / 1e9:.2f}"]
        in_ms = [seconds["computation"], seconds["FSDP"], seconds["averages"], step]
        row += [f"{1000 * each:,.0f}" for each in in_ms]
        ratio = BYTES_A_VALUE["int8"] / 4
        in_int8 = ratio * seconds["averages"]
        slowest = max(seconds["computation"], seconds["FSDP"], in_int8)
        row += [f"{ratio * sent['averages'] / 1e9:.2f}"]
        rows.append([*row, f"{1000 * in_int8:,.0f}", f"{1000 * slowest:,.0f}"])
    head = ["model", "GPUs", "shards", "GB sent between shards", "GB sent between replicas"]
    head += ["compute, ms", "shards, ms", "replicas, ms", "step, ms"]
    head += ["GB in int8", "replicas in int8, ms", "step in int8, ms"]
    report("scale-step", head, rows)


def split_over_a_group():
    """The table of chapter 07: a long sequence in bf16, 8 GPUs in tensor groups of n."""
    tokens, gpus, rows = 131_072, 8, []
    model = scale.model_of("Llama-3-8B", tokens)
    for n in (1, 2, 4, 8):
        split = plan.Split(STAGE_07, shards=gpus // n, tensor_size=n)
        of_a_block = tokens * plan.bytes_of_a_block(model.config, n)
        inputs = model.num_blocks * tokens * plan.BF16 * model.config.hidden_size / n
        parts = scale.memory(model, tokens, True, split)
        state = parts["parameters"] + parts["gradients"] + parts["moments"]
        logits = tokens * plan.bytes_of_logits(model.config, n)
        row = [model.num_blocks * of_a_block, inputs + of_a_block, logits]
        row += [state, sum(parts.values())]
        rows.append([n, *[f"{size / 1e9:.1f}" for size in row]])
    head = ["GB on each GPU, n", "activations", "activations with checkpointing"]
    head += ["logits and their gradient", "state", "peak with checkpointing"]
    report("scale-tensor", head, rows)


def split_over_four_machines():
    """The table of chapter 08: a step of 128 sequences on 4 machines of 8 GPUs, in four ways, with
    activation checkpointing. A GPU has one sequence in a micro-batch, a tensor group eight."""
    sequences, length, nodes, gpus, rows = 128, 8192, 4, 8, []
    model = scale.model_of("Llama-3-70B", length)
    blocks = " + ".join(map(str, plan.blocks_of_pipeline_stages(model, nodes)))
    ways = {
        "32 shards": plan.Split(STAGE_03, shards=32),
        "4 replicas of 8 shards": plan.Split(STAGE_05, shards=8),
        "tensor groups of 8, 4 shards": plan.Split(STAGE_07, shards=4, tensor_size=8),
        f"4 pipeline stages of {blocks} blocks, 8 shards": plan.Split(
            STAGE_08, shards=8, num_stages=4
        ),
    }
    given = {"nodes": nodes, "seq_length": length, "global_batch_size": sequences}
    for way, split in ways.items():
        batch_size = split.tensor_size
        groups = nodes * gpus // split.ranks_of_a_sequence
        num_micro_batches = sequences // (groups * batch_size)
        parts = scale.memory(model, batch_size * length, True, split, num_micro_batches)
        how = (model, split, True, batch_size, sequences // groups)
        fits = sum(parts.values()) < 80e9
        steps = [scale.step(*how, network=speed, **given) for speed in (FAST, SLOW)]
        sent = steps[0][0]
        crosses = {"03": sent["FSDP"], "05": gpus * sent["averages"]}
        crosses |= {"07": gpus * sent["FSDP"], "08": gpus * sent["group"]}
        name = "04" if split.stage == STAGE_05 else split.stage[:2]
        within = sent["group"] if split.tensor_size > 1 else sent["FSDP"]
        row = [name, way, f"{sum(parts.values()) / 1e9:,.0f}", f"{within / 1e9:,.0f}"]
        row += [f"{crosses[split.stage[:2]] / 1e9:,.0f}"]
        rows.append([*row, *[f"{step:,.0f}" if fits else "–" for _, _, step in steps]])
    head = ["stage", "split over 4 × 8 GPUs", "memory of the largest GPU, GB"]
    head += ["sent by a GPU within its machine, GB", "sent by a machine, GB"]
    head += ["step, s, 400 Gbit/s for each GPU", "step, s, 100 Gbit/s for each machine"]
    report("scale-split", head, rows)

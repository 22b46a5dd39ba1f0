"""The table of GUIDE.md, by the formulas of plan.py."""

from bench_common import report
from published import config_of

import plan

# Cards and their numbers in the table of GUIDE.md, and its models.
CARDS = ("RTX 4090", "L40S", "H100")
GPUS_AND_NODES = {1: (1, 1), 4: (4, 1), 8: (8, 1), 16: (8, 2)}
FINE_TUNED = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B")


def on_paper():
    report("fits", *what_fits())


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
                model = plan.sizes_of(config_of(name), args.seq_length)
                best = plan.plans_of(model, args)[0]
                row.append(short(best) if best["fits"] else "–")
            rows.append(row)
    return ["GPUs", *FINE_TUNED], rows


def short(best):
    """The number of a stage, and c with activation checkpointing, o with offloading."""
    letters = "c" * ("--activation-checkpointing" in best["flags"])
    letters += "o" * ("--cpu-offload" in best["flags"])
    return best["stage"][:2] + letters

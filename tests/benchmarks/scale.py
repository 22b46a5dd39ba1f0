"""Models for which the chapters have memory, traffic and time by the formulas of plan.py, and
what a rank sends for the experts of mixtures in stage 10.

`python tests/benchmarks/benchmark.py scale` writes the tables of chapters 05, 07 and 08, and
`context` those of chapter 09."""

from types import SimpleNamespace

import transformers
from published import config_of

import plan


def model_of(name, length):
    return plan.sizes_of(config_of(name), length)


def memory(model, tokens, recompute, split, num_micro_batches=1):
    """Bytes on each GPU by part, of stages 03 to 09."""
    if split.num_stages > 1:
        return plan.memory_of_a_pipeline(model, tokens, recompute, split, num_micro_batches)
    whole = plan.Part(model.num_blocks, model.in_blocks, model.in_root)
    return plan.memory_with_fsdp(model, whole, tokens, recompute, split, num_micro_batches)


def step(model, split, recompute, batch_size, sequences, **given):
    """What plan.py says of a step on H100s: bytes, seconds by part, and seconds of the step."""
    args = {"gpu": "H100", "gpus": 8, "nodes": 1, "peak_share": 0.4, "network": None} | given
    args = SimpleNamespace(**args)
    return plan.time_of_a_step(model, args, split, recompute, batch_size, sequences)


# What the experts of stage 10 need: of a block, for each rank.
MIXTURES = {
    # The defaults of the configurations in transformers are the sizes of these models, but for
    # those that are given here, which are from the config.json of the model on the hub.
    "Mixtral-8x7B": ("mixtral", {}),
    "OLMoE-1B-7B": ("olmoe", {"intermediate_size": 1024}),
    "Qwen3-30B-A3B": ("qwen3_moe", {}),
    "gpt-oss-20b": ("gpt_oss", {"num_local_experts": 32}),
    "DeepSeek-V3": ("deepseek_v3", {}),
}


def mixtures():
    """The configurations of published mixtures by name."""
    return {
        name: transformers.AutoConfig.for_model(kind, **sizes)
        for name, (kind, sizes) in MIXTURES.items()
    }


def experts_of(config):
    """How many experts a block has, and how many of them a token has."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    number = next(getattr(config, name) for name in names if hasattr(config, name))
    return number, config.num_experts_per_tok


def values_of_experts(config):
    """Parameters of one expert: two matrices from the hidden size to the width, and one back.
    Experts of gpt_oss also have biases."""
    width = getattr(config, "moe_intermediate_size", config.intermediate_size)
    biases = 2 * width + config.hidden_size if config.model_type == "gpt_oss" else 0
    return 3 * config.hidden_size * width + biases


def expert_bytes(config, tokens, ranks, expert_size, c=2, checkpointing=False):
    """What a rank sends for the experts of a block in a micro-batch of `tokens`, if all experts
    have equally many: by FSDP within a shard group, and as rows within an expert group, `c` bytes
    for each number. In stage 03 it is the first one with `expert_size` 1. FSDP gathers twice, and
    scatters gradients in fp32. Rows travel to the experts and back, and so do their gradients; with
    checkpointing the rows do that once more."""
    experts, chosen = experts_of(config)
    values = experts * values_of_experts(config)
    by_fsdp = (2 * c + 4) * values * (1 / expert_size - 1 / ranks)
    passes = 6 if checkpointing else 4
    rows = passes * c * tokens * chosen * config.hidden_size * (1 - 1 / expert_size)
    return by_fsdp, rows


def break_even_tokens(config, c=2, checkpointing=False):
    """With fewer tokens in a micro-batch of a rank than this, stage 10 sends less than stage 03,
    whatever the numbers of ranks: (1 - 1 / expert_size) is a factor of both sides."""
    experts, chosen = experts_of(config)
    of_a_token = (6 if checkpointing else 4) * c * chosen * config.hidden_size
    return (2 * c + 4) * experts * values_of_experts(config) / of_a_token

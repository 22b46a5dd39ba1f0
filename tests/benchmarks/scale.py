"""Memory, traffic and time of a step on paper, for Llama models in stages 03 to 05 and 07 to 09,
and what a rank sends for the experts of mixtures in stage 10.

The formulas stand in the chapters of stages 05 and 07 to 10, with their reasons.
tests/test_scale.py and tests/test_tensor_parallel.py hold the memory against what is measured.
`python tests/benchmarks/benchmark.py scale` writes the tables of the chapters."""

import torch
import transformers

LLAMA = {"bos_token_id": 0, "eos_token_id": 0, "num_key_value_heads": 8}
MODELS = {
    # Sizes from the config.json of each model on the hub.
    "Llama-3.2-1B": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32}
    | {
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
        "head_dim": 64,
    },
    "Llama-3-8B": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"intermediate_size": 14336, "vocab_size": 128256},
    "Llama-3-70B": {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64}
    | {"intermediate_size": 28672, "vocab_size": 128256},
}
# An H100: dense bf16 FLOP/s, of which a well-fed run reaches 40 %. Bytes/s in each direction of a
# GPU's NVLink and of a 400 Gbit/s adapter of its own, of which collectives reach 80 %. Sources:
# NVIDIA's data sheets; torchtitan's benchmarks (33 to 39 % for Llama-3.1-8B on 8 H100).
FLOPS, NVLINK, NETWORK = 0.4 * 989e12, 0.8 * 450e9, 0.8 * 50e9
# A ring through all GPUs of several nodes leaves each node once, for its 8 GPUs. NCCL makes a ring
# for each adapter. So what a GPU sends to the next one in such rings goes over 8 adapters.
RING_OVER_NODES = min(NVLINK, 8 * NETWORK)


def config_of(name):
    return transformers.LlamaConfig(**LLAMA | MODELS[name])


def parameters(config):
    """All of them, and those of one block."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model.num_parameters(), sum(p.numel() for p in model.model.layers[0].parameters())


def state_bytes(n, shards):
    """On each process: parameters, gradients and Adam's two moments, in fp32."""
    return 16 * n / shards


def gathered_bytes(n, block, layers):
    """What FSDP holds beside: in bf16 the root's parameters and two blocks, the one at work and the
    next; a block's gradients in bf16, and in fp32 as they leave."""
    return 2 * (n - layers * block) + 2 * 2 * block + (2 + 4) * block


def activation_bytes(config, c=2, ranks=1):
    """Per token and block, what autograd keeps on each rank of a tensor group, `c` bytes for each
    number: each norm its input in fp32, what it made of it, and a scale in fp32; attention its
    input, queries, keys, values, output, a sum per head in fp32; the MLP its input and four of its
    width. Of these, attention and MLP have their inputs whole on each rank of the group."""
    h, heads = config.hidden_size, config.num_attention_heads
    kv = config.num_key_value_heads * config.head_dim
    inputs = 2 * c * h
    norms = 2 * ((4 + c) * h + 4)
    attention = c * (2 * h + 2 * kv) + 4 * heads
    mlp = 4 * c * config.intermediate_size
    return inputs + (norms + attention + mlp) / ranks


def context_addend(config, ranks, c=2):
    """Per token of the sequence and block, what each of `ranks` ranks of a context group keeps
    beside its share of `activation_bytes`: keys and values of the other ranks' tokens, and the
    output of attention once more, because it is put together from two chunks."""
    output = config.num_attention_heads * config.head_dim
    keys_and_values = 2 * config.num_key_value_heads * config.head_dim
    return c * (keys_and_values * (1 - 1 / ranks) + (output / ranks if ranks > 1 else 0))


def context_bytes(config, ranks, c=2):
    """Per token of the sequence and block, what autograd keeps on each rank of a context group."""
    return activation_bytes(config, c) / ranks + context_addend(config, ranks, c)


def last_norm_bytes(config, ranks=1):
    """Per token: the input of the last norm in fp32 and bf16, of which each rank of a tensor group
    has its share, and its output, which is gathered."""
    h = config.hidden_size
    return (4 + 2) * h / ranks + 2 * h


def kept_by_a_block(config, compiled):
    """Bytes per token that autograd keeps of a block in bf16 by autocast. Chapter 01."""
    h, f, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    q, kv = heads * config.head_dim, config.num_key_value_heads * config.head_dim
    kept = 4 * q + 4 * kv + 4 * heads + 8
    kept += 10 * h + 6 * f if compiled else 26 * h + 8 * f
    if config.model_type == "qwen3":  # queries and keys have norms of their own
        norms = 4 * (heads + config.num_key_value_heads)
        kept += norms + (2 if compiled else 6) * (q + kv)
    return kept


def one_device(config, tokens, checkpointing=False, compiled=True):
    """Bytes of stage 01 in bf16 by autocast, with micro-batches of so many tokens: state, bf16
    copies of the weights, logits, and activations: those of the last norm and the blocks' inputs,
    and those within the blocks. Chapter 01."""
    n, _ = parameters(config)
    h, layers = config.hidden_size, config.num_hidden_layers
    logits = (4 if compiled else 12) * config.vocab_size * tokens
    if checkpointing:  # the peak is before the first block is computed again
        return [16 * n, 2 * config.vocab_size * h, logits, (10 + 4 * layers) * h * tokens, 0]
    inside = layers * kept_by_a_block(config, compiled) * tokens
    return [16 * n, 2 * n, logits, 10 * h * tokens, inside]


def peak_bytes(state, root, block, kept, again=0, logits=0, last=0):
    """In bf16 with FSDP: the largest of three peaks. `root` and `block` are numbers of parameters,
    and the other arguments are bytes: what blocks keep, what a checkpointed block computes again,
    the logits with their gradient and what the last norm keeps, and the gradient of the output
    layer.

    The first peak is where the gradient of the logits is computed. The root and the last block,
    which is gathered ahead, are whole there. The second is in the backward of a block, when logits
    and last norm have been freed: two blocks are gathered, and the gradients of one are there in
    bf16 and fp32. The third is at the end, with the gradients of the root in bf16 and fp32."""
    at_the_loss = 2 * root + 2 * block + logits
    in_a_block = 2 * root + (2 * 2 + 2 + 4) * block + again + last
    at_the_end = (2 + 4) * root
    return state + max(kept + at_the_loss, kept + in_a_block, at_the_end)


def logit_bytes(config, ranks=1):
    """Per token, with a compiled loss: logits and their gradient in bf16. If a tensor group splits
    them, each rank has for its part the logits in bf16 and two tensors of their size in fp32."""
    return (10 if ranks > 1 else 4) * config.vocab_size / ranks


def flops(config, n, length):
    """Per token, forward and backward: PaLM, arXiv:2204.02311, appendix B."""
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    width = config.num_attention_heads * config.head_dim
    return 6 * (n - embedding) + 12 * config.num_hidden_layers * width * length


def sizes(name, shards, tokens):
    """Bytes on each GPU, with micro-batches of `tokens` and gradients that add up in shards."""
    config = config_of(name)
    n, block = parameters(config)
    layers, each = config.num_hidden_layers, activation_bytes(config)
    kept = tokens * layers * each
    inputs = tokens * (layers * 2 * config.hidden_size + each)
    last_norm = tokens * last_norm_bytes(config)
    state, logits = state_bytes(n, shards), tokens * logit_bytes(config)
    last = 2 * config.vocab_size * config.hidden_size
    model, again = (state, n - layers * block, block), tokens * each
    return {
        "state": state,
        "gathered": gathered_bytes(n, block, layers),
        "logits": logits,
        "activations": kept,
        "checkpointed": inputs,
        "total": peak_bytes(*model, kept, 0, logits + last_norm, last),
        "total, checkpointed": peak_bytes(*model, inputs - again, again, logits + last_norm, last),
        "kept": 4 * n + 2 * n,  # whole gradients in fp32, and parameters in bf16
    }


def context_sizes(name, shards, length, ranks, checkpointing):
    """Bytes on each GPU, with one sequence of `length` tokens in a context group of `ranks`.

    The gradients of keys and values, and what else a block needs for a moment, do not count."""
    config = config_of(name)
    n, block = parameters(config)
    layers, h = config.num_hidden_layers, config.hidden_size
    state, logits = state_bytes(n, shards), length / ranks * logit_bytes(config)
    last = 2 * config.vocab_size * h
    of_a_block = length * context_bytes(config, ranks)
    kept, again = layers * of_a_block, 0
    if checkpointing:
        kept, again = layers * 2 * h * length / ranks, of_a_block
    last_norm = length / ranks * last_norm_bytes(config)
    peak = peak_bytes(state, n - layers * block, block, kept, again, logits + last_norm, last)
    blocks_with_keys = 1 if checkpointing else layers
    gathered_keys = 2 * 2 * config.num_key_value_heads * config.head_dim * length
    return {
        "state": state,
        "gathered": gathered_bytes(n, block, layers),
        "logits": logits,
        "kept": kept,
        "again": again,
        "keys and values": blocks_with_keys * gathered_keys,
        "last norm": last_norm,
        "total": peak,
    }


def traffic(name, shards, gpus, tokens, length, ratio, links, recompute):
    """Bytes that a GPU sends per step between the shards and between the replicas, and the seconds
    of compute, of each of the two, and of a step in which they hide one another."""
    config = config_of(name)
    n, _ = parameters(config)
    # Gathered for the forward and the backward in bf16, gradients scattered in fp32.
    inner = (2 * 2 + 4) * n * (shards - 1) / shards
    replicas = gpus // shards
    outer = 2 * 4 * n / shards * (replicas - 1) / replicas / ratio
    compute = recompute * tokens * flops(config, n, length) / FLOPS
    seconds = [compute, inner / links[0], outer / links[1]]
    return inner, outer, [*seconds, max(seconds)]


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


# What a node sends in a second: with an adapter of 400 Gbit/s for each of its 8 GPUs, and with one
# of 100 Gbit/s for all of them.
FAST_NODE, SLOW_NODE = 8 * NETWORK, 0.8 * 12.5e9


def step_on_four_nodes(stage, name, sequences, length, blocks_per_stage):
    """A step of `sequences` on 4 nodes of 8 GPUs, with activation checkpointing, in bf16: bytes in
    the memory of the largest GPU, bytes that a GPU sends to others of its node, bytes that a node
    sends to other nodes, and a function from the bytes a second of a node to the seconds of a step.

    A GPU has a sequence in each micro-batch: in stage 07 eight GPUs have eight, and in stage 08
    each pipeline stage has one. `blocks_per_stage` is for the pipeline stages of stage 08."""
    nodes, gpus, c = 4, 8, 2
    config = config_of(name)
    n, block = parameters(config)
    layers, h = config.num_hidden_layers, config.hidden_size
    vocabulary = config.vocab_size * h
    micro_batches = sequences // (nodes * gpus)
    compute = 4 / 3 * sequences * length * flops(config, n, length) / (nodes * gpus * FLOPS)
    inputs, one_block = length * c * h, length * activation_bytes(config)
    logits = length * logit_bytes(config)
    idle, exposed, inner, outer, shards = 1, 0, 0, 0, nodes * gpus

    # FSDP gathers parameters twice in bf16, and scatters gradients in fp32, in each micro-batch.
    fsdp = 2 * 2 + 4
    ranks = gpus if stage == "07" else 1  # that compute a sequence together
    state = state_bytes(n, gpus if stage == "04" else shards)
    model = (state, (n - layers * block) / ranks, block / ranks)
    of_micro_batch = ranks * length * logit_bytes(config, ranks)
    memory = peak_bytes(*model, layers * inputs, one_block, of_micro_batch, 2 * vocabulary / ranks)
    if stage == "03":
        # In a ring through all GPUs one of each node sends to the next node.
        inner = outer = micro_batches * fsdp * n * (shards - 1) / shards
    elif stage == "04":
        inner = micro_batches * fsdp * n * (gpus - 1) / gpus
        outer = gpus * 2 * 4 * n / gpus * (nodes - 1) / nodes
    elif stage == "07":
        # In a block 6 all-gathers and 5 reduce-scatters, in both ends 2 of each.
        exposed = micro_batches * (11 * layers + 4) * gpus * inputs * (gpus - 1) / gpus
        inner = exposed
        outer = gpus * micro_batches * fsdp * n / gpus * (nodes - 1) / nodes
    elif stage == "08":
        micro_batches *= nodes
        totals = []
        for pipeline_stage, blocks in enumerate(blocks_per_stage):
            is_last = pipeline_stage == nodes - 1
            is_end = pipeline_stage == 0 or is_last
            of_stage = blocks * block + is_end * vocabulary
            inner = max(inner, micro_batches * fsdp * of_stage * (gpus - 1) / gpus)
            model = (state_bytes(of_stage, gpus), of_stage - blocks * block, block)
            kept = (nodes - pipeline_stage) * blocks * inputs  # of all micro-batches in flight
            ends = (logits, 2 * vocabulary) if is_last else (0, 0)
            totals.append(peak_bytes(*model, kept, one_block, *ends))
        memory = max(totals)
        outer = gpus * 2 * micro_batches * inputs
        idle = (micro_batches + nodes - 1) / micro_batches

    def seconds(speed_of_node):
        if stage == "08":  # a pipeline stage waits for each exchange with another one
            return idle * (max(compute, inner / NVLINK) + outer / speed_of_node)
        return max(compute + exposed / NVLINK, (inner - exposed) / NVLINK, outer / speed_of_node)

    return {"memory": memory, "within": inner, "between": outer, "seconds": seconds}

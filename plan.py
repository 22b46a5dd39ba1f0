"""Which stages fit a model on your GPUs, how long a step takes, and the command that starts it.

    python plan.py -m Qwen/Qwen3-0.6B --gpu-memory 24
    python plan.py -m Qwen/Qwen3-8B --gpu H100 --gpus 8 -s 4096 --tokens 1e9
    python plan.py -m meta-llama/Llama-3.1-70B --gpu H100 --gpus 8 --nodes 4 -s 8192

Only the config of the model is read. Memory is computed for the defaults of the scripts on a GPU,
bf16 and compiled blocks, by formulas that chapters 01, 03, 07, 08 and 09 derive. They hold for
models with the blocks of Llama, Mistral, Qwen2 and Qwen3. Of other models the state and the logits
are known, but not the activations. Times are estimates: a share of the GPU's peak (--peak-share),
and links at their usual speed.
"""

import argparse
import json
import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.modeling_layers import GradientCheckpointingLayer

from logs_and_checkpoints import EXPERTS_PER_TOKEN, fail, flops_per_token, peak_flops

PCIE = 64  # GB/s in each direction of PCIe 5.0, of which version 4.0 has half
# GB of a GPU, and GB/s at which it sends to another GPU of its machine: by NVLink in the first
# line, by PCIe in the others. Sources: NVIDIA's data sheets.
GPUS = {"H100": (80, 450), "H200": (141, 450), "B200": (180, 900), "A100": (80, 300)}
GPUS |= {"L40S": (48, PCIE / 2), "L4": (24, PCIE / 2), "A10": (24, PCIE / 2)}
GPUS |= {"RTX 3090": (24, PCIE / 2), "RTX 4090": (24, PCIE / 2), "RTX 5090": (32, PCIE)}
# The share of a link's speed that collectives reach.
LINK_SHARE = 0.8
# The share of a GPU's memory that is planned with. On an H100 the peaks of what PyTorch's tensors
# use were at most 0.1 GB above the formulas in stage 01 (outputs/measured/gpu.md). CUDA and its
# libraries, buffers of NCCL, and what the allocator holds without using it come on top.
MEMORY_SHARE = 0.9
# Types of models whose blocks keep what the formulas say.
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
BF16, FP32 = 2, 4  # bytes


@dataclass
class Model:
    """The sizes of a model, in numbers of parameters.

    If it is a mixture of experts, `in_experts` are those of the experts of a block, of which there
    are `num_experts`. A token uses `experts_per_token`."""

    config: transformers.PretrainedConfig
    number: int
    in_blocks: int
    in_largest_block: int
    num_blocks: int
    flops_per_token: float  # forward and backward pass
    in_experts: int = 0
    num_experts: int = 0
    experts_per_token: int = 0

    @property
    def in_root(self):
        """Those outside the blocks, such as the embeddings."""
        return self.number - self.in_blocks

    @property
    def is_known(self):
        """Whether the formulas for activations hold."""
        return self.config.model_type in LLAMA_LIKE


@dataclass
class Split:
    """How a stage divides a model and its data over the GPUs.

    `shards` are the ranks among which FSDP divides the state. The ranks of a tensor group, a
    context group or a pipeline share their sequences."""

    stage: str
    flags: tuple = ()
    shards: int = 1
    tensor_size: int = 1
    context_size: int = 1
    num_stages: int = 1
    expert_size: int = 1
    keep_gathered: bool = False
    offload: bool = False

    @property
    def ranks_of_a_sequence(self):
        return self.tensor_size * self.context_size * self.num_stages


@dataclass
class Part:
    """What a rank computes: the whole model, or a pipeline stage with some of the blocks.

    `in_flight` are the micro-batches whose activations it keeps at once."""

    num_blocks: int
    in_blocks: int
    in_root: int
    has_loss: bool = True
    in_flight: int = 1


def main(args):
    model = load_model(args)
    plans = plans_of(model, args)
    if args.json:
        print(json.dumps(describe(model, args) | {"plans": plans}, indent=1))
    else:
        answer(model, args, plans)


def load_model(args):
    """Reads the config as the scripts do, and builds the model on the meta device."""
    name = args.model_name
    if name == "tiny":  # as in the scripts
        config = transformers.LlamaConfig(
            vocab_size=1024,
            hidden_size=128,
            intermediate_size=320,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )
    else:
        try:
            config = transformers.AutoConfig.from_pretrained(name).get_text_config()
        except Exception as error:  # of several types
            reason = f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
            fail(f"--model-name {name}: AutoConfig cannot load it: {reason}")
        if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            kind = config.model_type
            fail(f"--model-name {name}: transformers has no language model of type {kind}")
        files = {path.name for path in Path(name).glob("[!.]*")}
        is_config_alone = files and files <= {"config.json", "generation_config.json"}
        args.from_scratch = args.from_scratch or is_config_alone
    longest = getattr(config, "max_position_embeddings", None) or sys.maxsize
    args.seq_length = args.seq_length or min(1024, longest)
    if args.seq_length > longest:
        fail(f"--seq-length {args.seq_length}: {name} takes from 2 to {longest} tokens")

    model = sizes_of(config, args.seq_length)
    if model.num_blocks == 0:
        fail(f"--model-name {name}: no transformer blocks were found in it")
    return model


def sizes_of(config, seq_length):
    """The sizes of a model with this config. It is built on the meta device, without memory."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    blocks = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
    in_largest = max(sizes, default=0)
    flops = flops_per_token(model, seq_length)
    number = model.num_parameters()
    return Model(config, number, sum(sizes), in_largest, len(blocks), flops, *experts(model))


def experts(model):
    """Parameters of the experts of a block, their number, and how many a token uses, if stage 10
    can split them: then their parameters have the experts in dimension 0."""
    found = [
        module
        for module in model.modules()
        if hasattr(module, "has_gate") and len(next(module.parameters())) == module.num_experts
    ]
    if not found:
        return 0, 0, 0
    in_experts = sum(p.numel() for p in found[0].parameters())
    per_token = next(n for n in EXPERTS_PER_TOKEN.split() if hasattr(model.config, n))
    return in_experts, found[0].num_experts, getattr(model.config, per_token)


# What can be run, and the best of it


def plans_of(model, args):
    """All plans: what fits before what does not, and the fastest first."""
    if args.global_batch_size is None:  # a micro-batch of about 4096 tokens for each GPU
        sequences = args.gpus * args.nodes * max(1, 4096 // args.seq_length)
        args.global_batch_size = max(8, sequences)
    ways = (False, True) if model.is_known else (True,)  # with activation checkpointing
    plans = [plan(model, args, split, again) for split in splits(model, args) for again in ways]
    return sorted(plans, key=lambda one: (not one["fits"], slowness(one)))


def splits(model, args):
    """The ways in which the stages can divide the model over these GPUs."""
    world = args.gpus * args.nodes
    if world == 1:
        yield Split("01-single-gpu")
    elif args.nodes == 1:
        yield Split("02-ddp")
        yield Split("03-fsdp", shards=world)
        yield Split("03-fsdp", ("--no-reshard-after-forward",), world, keep_gathered=True)
    else:
        for nodes in range(1, args.nodes + 1):
            if args.nodes % nodes == 0:
                shards = nodes * args.gpus
                yield Split("05-multinode", ("--shard-size", shards), shards)
    if args.nodes == 1:
        yield Split("03-fsdp", ("--cpu-offload",), world, offload=True)
    for size in (2**i for i in range(1, 10) if world % 2**i == 0):
        if model.num_experts and model.num_experts % size == 0:
            flags = ("--expert-size", size)
            yield Split("10-expert-parallel", flags, world, expert_size=size)
        if not model.is_known:
            continue
        if size <= args.gpus and model.config.num_key_value_heads % size == 0:
            flags = ("--tensor-size", size)
            yield Split("07-tensor-parallel", flags, world // size, tensor_size=size)
        if size <= model.num_blocks:
            flags = ("--stages", size)
            yield Split("08-pipeline-parallel", flags, world // size, num_stages=size)
        if args.seq_length % (2 * size) == 0:
            yield Split("09-context-parallel", ("--context-size", size), world, context_size=size)


def plan(model, args, split, recompute):
    """The fastest micro-batch that fits, or that of one sequence if none does, as a dict."""
    ranks = args.gpus * args.nodes // split.ranks_of_a_sequence
    share = math.ceil(args.global_batch_size / ranks)

    def memory(batch_size):
        how = batch_size * args.seq_length, recompute
        if split.stage in ("01-single-gpu", "02-ddp"):
            return memory_of_a_whole_copy(model, *how)
        num_micro_batches = math.ceil(share / batch_size)
        if split.num_stages > 1:
            return memory_of_a_pipeline(model, *how, split, num_micro_batches)
        whole = Part(model.num_blocks, model.in_blocks, model.in_root)
        return memory_with_fsdp(model, whole, *how, split, num_micro_batches)

    def time(batch_size):
        num_micro_batches = math.ceil(share / batch_size)
        return time_of_a_step(model, args, split, recompute, batch_size, num_micro_batches)

    largest_batch_size = 0
    while largest_batch_size < 1024 and fits(memory(largest_batch_size + 1), args):
        largest_batch_size += 1
    sizes = range(max(1, min(largest_batch_size, share)), 0, -1)
    batch_size = min(sizes, key=lambda size: time(size)[2] or 0)  # the largest of equal ones
    if not model.is_known:
        batch_size = 1
    parts = memory(batch_size)
    sent, seconds_of, seconds = time(batch_size)
    flags = [*split.flags, *(["--activation-checkpointing"] if recompute else [])]
    tokens_per_second = args.global_batch_size * args.seq_length / seconds if seconds else None
    result = {
        "stage": split.stage,
        "flags": " ".join(map(str, flags)),
        "fits": largest_batch_size > 0,
        "batch_size": batch_size,
        "largest_batch_size": largest_batch_size,
        "gb": {name: size / 1e9 for name, size in parts.items()},
        "total_gb": sum(parts.values()) / 1e9,
        "sent_gb": sum(sent.values()) / 1e9,
        "tokens_per_second": tokens_per_second,
        "seconds": seconds_of,
        "command": command(args, split.stage, batch_size, flags),
    }
    if not model.is_known:
        result["gb"]["activations"] = result["largest_batch_size"] = None
    return result


def fits(parts, args):
    return sum(parts.values()) <= MEMORY_SHARE * args.gpu_memory * 1e9


def slowness(one):
    """A key to sort by: the speed, or what usually makes a run slow, the worst first."""
    if one["tokens_per_second"]:
        return 0, -one["tokens_per_second"]
    offload = "--cpu-offload" in one["flags"]
    return 1, offload, one["stage"] >= "07", "--activation-checkpointing" in one["flags"]


def command(args, stage, batch_size, flags):
    """The command that starts a stage, in the folder of this file."""
    script = f"{stage}/train-llm.py"
    if stage == "01-single-gpu":
        start = ["python", script]
    elif args.nodes == 1:
        start = ["torchrun", "--standalone", "--nproc-per-node", args.gpus, script]
    else:
        start = [] if stage == "05-multinode" else [f"SCRIPT={script}"]
        start += [f"NNODES={args.nodes}", f"NPROC_PER_NODE={args.gpus}", "MASTER_ADDR=HOST"]
        start += ["bash", "05-multinode/run.sh"]
    given = ["-e", args.experiment_name, "-m", args.model_name]
    given += ["--from-scratch"] if args.from_scratch else []
    given += ["-d", args.dataset_name] if args.dataset_name else []
    given += ["-s", args.seq_length, "-b", batch_size]
    given += ["--global-batch-size", args.global_batch_size]
    return shlex.join(map(str, [*start, *given, *flags]))


# Memory of the rank that needs most, in bytes, by part. `tokens` are those of a micro-batch, which
# the ranks of a sequence share. With `recompute`, activation checkpointing, blocks keep only their
# input, and compute the rest again.


def memory_of_a_whole_copy(model, tokens, recompute):
    """Stages 01 and 02. Autocast makes bf16 copies of the weights. If blocks are computed again, it
    makes them for each block anew. Then the peak is at the loss or in a block."""
    config, n = model.config, model.number
    state = {"parameters": FP32 * n, "gradients": FP32 * n, "moments": 2 * FP32 * n}
    logits = tokens * bytes_of_logits(config)
    if not model.is_known:
        return state | {"copies": 0, "activations": 0, "logits": logits}

    block = tokens * bytes_of_an_autocast_block(config)
    last_norm = tokens * 10 * config.hidden_size
    if not recompute:
        activations = model.num_blocks * block + last_norm
        return state | {"copies": BF16 * n, "activations": activations, "logits": logits}
    inputs = tokens * model.num_blocks * FP32 * config.hidden_size
    output_layer = BF16 * config.vocab_size * config.hidden_size
    of_a_block = BF16 * model.in_largest_block
    at_the_loss = {"copies": output_layer, "activations": inputs + last_norm, "logits": logits}
    in_a_block = {"copies": of_a_block, "activations": inputs + block, "logits": 0}
    return state | largest([at_the_loss, in_a_block])


def memory_with_fsdp(model, part, tokens, recompute, split, num_micro_batches):
    """Stages 03 to 10. The peak is at one of three moments: at the loss, where the root and the
    last block are whole; in the backward pass of a block, with two blocks, and the gradients of one
    in bf16 and fp32; or at its end, where the gradients of the root are averaged."""
    config, tensor_size = model.config, split.tensor_size
    in_blocks, root = part.in_blocks / tensor_size, part.in_root / tensor_size
    experts_elsewhere = model.in_experts * (1 - 1 / split.expert_size)
    block = (model.in_largest_block - experts_elsewhere) / tensor_size
    output_layer = part.has_loss * BF16 * config.vocab_size * config.hidden_size / tensor_size
    n = 0 if split.offload else (in_blocks + root) / split.shards  # on the GPU
    state = {"parameters": FP32 * n, "gradients": FP32 * n, "moments": 2 * FP32 * n}

    own_tokens = tokens / split.context_size
    logits = part.has_loss * own_tokens * bytes_of_logits(config, tensor_size)
    last_norm, kept, again = 0, 0, 0
    if model.is_known:
        last_norm = part.has_loss * own_tokens * bytes_of_last_norm(config, tensor_size)
        of_a_block = tokens * bytes_of_a_block(config, tensor_size, split.context_size)
        its_input = own_tokens * BF16 * config.hidden_size / tensor_size
        kept = part.in_flight * part.num_blocks * (its_input if recompute else of_a_block)
        again = of_a_block if recompute else 0

    at_the_loss = BF16 * (root + block)
    in_a_block = BF16 * (root + 2 * block) + output_layer + (BF16 + FP32) * block
    at_the_end = (BF16 + FP32) * root
    if split.keep_gathered:  # and gradients of several micro-batches add up whole
        whole = FP32 * (in_blocks + root) if num_micro_batches > 1 else 0
        at_the_loss = BF16 * (root + in_blocks) + whole
        in_a_block = BF16 * (root + in_blocks) + output_layer + max(whole, (BF16 + FP32) * block)
    return state | largest(
        [
            {"copies": at_the_loss, "activations": kept + last_norm, "logits": logits},
            {"copies": in_a_block, "activations": kept + again, "logits": 0},
            {"copies": at_the_end, "activations": 0, "logits": 0},
        ]
    )


def memory_of_a_pipeline(model, tokens, recompute, split, num_micro_batches):
    """Stage 08: that of the pipeline stage that needs most."""
    parts = parts_of_a_pipeline(model, split.num_stages, num_micro_batches)
    return largest(memory_with_fsdp(model, part, tokens, recompute, split, 1) for part in parts)


def parts_of_a_pipeline(model, num_stages, num_micro_batches):
    """Pipeline stage s keeps the activations of up to num_stages - s micro-batches. The first one
    has the embeddings, and the last one the output layer."""
    parts = []
    for s, num_blocks in enumerate(blocks_of_pipeline_stages(model, num_stages)):
        is_last = s == num_stages - 1
        root = model.config.vocab_size * model.config.hidden_size if s == 0 or is_last else 0
        in_flight = min(num_stages - s, num_micro_batches)
        in_blocks = num_blocks * model.in_largest_block
        parts.append(Part(num_blocks, in_blocks, root, is_last, in_flight))
    return parts


def blocks_of_pipeline_stages(model, num_stages):
    """How many blocks each has, as `keep_stage` of stage 08 divides them."""
    vocabulary = model.config.vocab_size * model.config.hidden_size
    extra = vocabulary // model.in_largest_block
    extra = min(extra, (model.num_blocks - num_stages) // max(1, num_stages - 1))
    shares = np.array_split(range(model.num_blocks + extra), num_stages)
    return [int((share < model.num_blocks).sum()) for share in shares]


def largest(moments):
    return max(moments, key=lambda parts: sum(parts.values()))


def bytes_of_a_block(config, tensor_size=1, context_size=1):
    """What autograd keeps of a compiled block in bf16, for each token.

    That is the input of the block and that of its MLP, and both after their norms; queries, keys,
    values and the output of attention; three tensors of the MLP's width; and in fp32 a factor of
    each norm and a sum of each head. In a tensor group only what follows the norms is whole. In a
    context group a rank has its share of the tokens, but keys and values of all tokens, and the
    output of attention twice, because it is put together from two chunks."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    q, kv = heads * head_dim(config), kv_heads * head_dim(config)
    in_bf16 = 2 * config.hidden_size + 2 * q + 2 * kv + 3 * config.intermediate_size
    in_fp32 = 2 + heads
    if config.model_type == "qwen3":  # has norms of queries and keys
        in_bf16 += q + kv
        in_fp32 += heads + kv_heads
    kept = (BF16 * in_bf16 + FP32 * in_fp32) / tensor_size + BF16 * 2 * config.hidden_size
    if context_size > 1:
        kept = kept / context_size + BF16 * (2 * kv * (1 - 1 / context_size) + q / context_size)
    return kept


def bytes_of_an_autocast_block(config):
    """The same in stages 01 and 02. With autocast the input of a block is in fp32."""
    return bytes_of_a_block(config) + (FP32 - BF16) * config.hidden_size


def head_dim(config):
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def bytes_of_logits(config, tensor_size=1):
    """Logits and their gradient in bf16, for each token: the loss is compiled. A tensor group that
    splits them has the logits in bf16 and two tensors of their size in fp32."""
    return (10 if tensor_size > 1 else 4) * config.vocab_size / tensor_size


def bytes_of_last_norm(config, tensor_size=1):
    """Its input in fp32 and bf16, and its output, which a tensor group gathers, for each token."""
    return (FP32 + BF16) * config.hidden_size / tensor_size + BF16 * config.hidden_size


# Communication and time


def time_of_a_step(model, args, split, recompute, batch_size, num_micro_batches):
    """Bytes that a GPU sends in a step for FSDP, for averages between machines, and to the ranks of
    a group, as a dict; the seconds of each of these and of the computation, as a dict; and those of
    the step. Seconds are None if the speed of the GPU is not known.

    Computation, the communication of FSDP and averages between machines overlap, so the longest of
    them counts. While the ranks of a group send each other something, they compute nothing."""
    n, m, world = model.number, num_micro_batches, args.gpus * args.nodes
    hidden_states = BF16 * batch_size * args.seq_length * model.config.hidden_size
    shards, passes = split.shards, 3 if recompute else 2
    within = m * sent_by_fsdp(model.in_blocks, model.in_root) / split.tensor_size
    between = exposed = 0
    idle = 1
    if split.stage == "02-ddp":
        shards, within = world, 2 * FP32 * n
    if split.keep_gathered:
        within = (BF16 + FP32) * n
    if split.stage == "05-multinode":
        replicas = world // shards
        between = 2 * FP32 * n / shards * (replicas - 1) / replicas
    if split.tensor_size > 1:
        collectives = (11 if recompute else 8) * model.num_blocks + 4
        exposed = m * collectives * hidden_states * (1 - 1 / split.tensor_size)
    if split.context_size > 1:
        kv = model.config.num_key_value_heads * head_dim(model.config)
        keys_and_values = 2 * BF16 * batch_size * args.seq_length * kv
        exposed = m * passes * model.num_blocks * keys_and_values * (1 - 1 / split.context_size)
    if split.num_stages > 1:
        parts = parts_of_a_pipeline(model, split.num_stages, m)
        within = m * max(sent_by_fsdp(part.in_blocks, part.in_root) for part in parts)
        exposed = 2 * m * hidden_states
        idle = (m + split.num_stages - 1) / m
    within *= 1 - 1 / shards
    if split.expert_size > 1:
        elsewhere = 1 - 1 / split.expert_size  # the share of the experts
        within -= m * sent_by_fsdp(model.num_blocks * model.in_experts * elsewhere, 0)
        rows = 2 * passes * model.experts_per_token * hidden_states
        exposed = m * model.num_blocks * rows * elsewhere
    sent = {"FSDP": within, "averages": between, "group": exposed}

    peak = peak_flops(args.gpu or "")
    if not peak or split.offload:
        return sent, None, None
    flops = model.flops_per_token * args.global_batch_size * args.seq_length
    _, to_another_gpu = GPUS[args.gpu]
    usual = 400 * args.gpus if to_another_gpu > PCIE else 100
    link = LINK_SHARE * to_another_gpu * 1e9
    machine = LINK_SHARE * (args.network or usual) * 1e9 / 8
    # A ring through the GPUs of several machines leaves each machine once. The GPUs of a tensor
    # group are in as many rings, and so are those of an expert group with their experts.
    rings = split.tensor_size * min(split.expert_size, args.gpus)
    fsdp = min(link, machine / rings) if shards * split.tensor_size > args.gpus else link
    group = min(link, machine) if split.context_size > args.gpus else link
    if args.nodes > 1 and (split.num_stages > 1 or split.expert_size > args.gpus):
        group = machine / args.gpus  # all GPUs of a machine send to other machines
    seconds = {
        "computation": (4 / 3 if recompute else 1) * flops / (world * peak * args.peak_share),
        "group": exposed / group,
        "FSDP": within / fsdp,
        "averages": between / (machine / args.gpus),
    }
    in_order = seconds["computation"] + seconds["group"]
    return sent, seconds, idle * max(in_order, seconds["FSDP"], seconds["averages"])


def sent_by_fsdp(in_blocks, in_root):
    """Bytes for a micro-batch, with very many ranks: blocks are gathered twice and the root once,
    in bf16, and the gradients of both are scattered in fp32."""
    return (2 * BF16 + FP32) * in_blocks + (BF16 + FP32) * in_root


# What is printed


def describe(model, args):
    return {
        "model": args.model_name,
        "parameters": model.number,
        "activations_are_known": model.is_known,
        "gpus": args.gpus,
        "nodes": args.nodes,
        "gpu_memory_gb": args.gpu_memory,
        "planned_gb": MEMORY_SHARE * args.gpu_memory,
        "sequence_length": args.seq_length,
        "global_batch_size": args.global_batch_size,
        "cpu_memory_of_rank_0_gb": 4 * model.number / 1e9,
        "checkpoint_gb": 12 * model.number / 1e9,
    }


def answer(model, args, plans):
    """Prints what fits, what does not, and the command of the fastest plan."""
    gpus = f"{args.nodes} × {args.gpus}" if args.nodes > 1 else args.gpus
    planned = MEMORY_SHARE * args.gpu_memory
    print(f"{args.model_name}: {model.number:,} parameters, {model.num_blocks} blocks")
    print(f"{gpus} GPU(s) of {args.gpu_memory:g} GB, of which {planned:.1f} GB are planned with.")
    print("The rest is for CUDA, NCCL and what PyTorch's allocator holds without using it.")
    print(f"A step has {args.global_batch_size} sequences of {args.seq_length} tokens.\n")

    best = {}
    for one in plans:
        best.setdefault((one["stage"], args.all and one["flags"]), one)
    fitting = [one for one in best.values() if one["fits"]]
    if fitting:
        print(table(fitting, args))
    for stage in dict.fromkeys(one["stage"] for one in plans):
        of_stage = [one for one in plans if one["stage"] == stage]
        if not any(one["fits"] for one in of_stage):
            smallest = min(of_stage, key=lambda one: one["total_gb"])
            total, how = smallest["total_gb"], f"{stage} {smallest['flags']} -b 1"
            print(f"does not fit: {how} needs {total:.1f} GB, {total - planned:.1f} too many")
    if not model.is_known:
        print(f"The activations of {model.config.model_type} are not known, and they come on top.")
        print("Start with -b 1 and --activation-checkpointing, and look at memory/peak_gb.")
    for one in fitting:
        seconds = one["seconds"]
        if seconds and seconds["averages"] == max(seconds.values()):
            print(f"{one['stage']} waits for averages between machines: --compression int8 sends")
            print("a quarter of their bytes (chapter 04).")
    if not fitting:
        print(what_would_help(model, args))
        return
    first = fitting[0]
    print(f"\n{first['command']}\n")
    whole = FP32 * model.number / 1e9
    print(f"CPU memory of rank 0, to load and to export: {whole:.1f} GB")
    if "--cpu-offload" in first["flags"]:
        print(f"CPU memory of the machine, for the state: {4 * whole:.1f} GB")
    print(f"disk, for each checkpoint: {3 * whole:.1f} GB")


def table(plans, args):
    """In Markdown. "Copies" are weights in bf16, and gradients that have not been averaged yet."""
    head = ["stage", "flags", "-b", "largest -b", "state", "copies", "activations", "logits"]
    head += ["GB of a GPU", "GB sent in a step", "tokens/s", *(["hours"] if args.tokens else [])]
    rows = []
    for one in plans:
        gb, speed = one["gb"], one["tokens_per_second"]
        state = gb["parameters"] + gb["gradients"] + gb["moments"]
        numbers = [state, gb["copies"], gb["activations"], gb["logits"], one["total_gb"]]
        numbers.append(one["sent_gb"])
        row = [one["stage"], one["flags"], one["batch_size"], one["largest_batch_size"] or "?"]
        row += ["?" if number is None else f"{number:.1f}" for number in numbers]
        row.append(f"{speed:,.0f}" if speed else "?")
        if args.tokens:
            row.append(f"{args.tokens / speed / 3600:,.1f}" if speed else "?")
        rows.append(row)
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def what_would_help(model, args):
    """Shorter sequences or more GPUs, whichever first makes something fit."""
    given = vars(args).copy()
    found = []
    for name in ("seq_length", "gpus"):
        for _ in range(10):
            value = getattr(args, name)
            setattr(args, name, value // 2 if name == "seq_length" else value * 2)
            if args.seq_length < 64:
                break
            every = [plan(model, args, split, 1) for split in splits(model, args)]
            if any(one["fits"] for one in every):
                flag = "-s" if name == "seq_length" else "--gpus"
                found.append(f"{flag} {getattr(args, name)}")
                break
        vars(args).update(given)
    return f"It would fit with {' or '.join(found)}." if found else "Shorter sequences do not help."


def parse_args(given=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-m", "--model-name", default="tiny", help="tiny, a hub id, or a folder")
    add("--gpu", choices=list(GPUS), help="its memory and its speed, default: H100")
    add("--gpu-memory", type=float, help="GB of a GPU; without --gpu no times are estimated")
    add("--gpus", type=positive, default=1, help="of each machine, default: 1")
    add("--nodes", type=positive, default=1, help="machines, default: 1")
    network_help = "Gbit/s of each machine, default: 400 for each GPU with NVLink, else 100"
    add("--network", type=float, help=network_help)
    add("-s", "--seq-length", type=positive, help="default: 1024, or the model's limit")
    batch_help = "sequences of a step, default: about 4096 tokens for each GPU"
    add("--global-batch-size", type=positive, help=batch_help)
    add("--tokens", type=float, help="of the whole training, for the hours")
    add("--peak-share", type=float, default=0.4, help="of the GPU's peak speed, default: 0.4")
    add("-e", "--experiment-name", default="my-run", help="for the command, default: my-run")
    add("-d", "--dataset-name", help="for the command")
    add("--from-scratch", action="store_true", help="for the command")
    add("--all", action="store_true", help="show all ways, not only the fastest of each stage")
    add("--json", action="store_true", help="print all as JSON")
    args = parser.parse_args(given)
    if args.gpu is None and args.gpu_memory is None:
        args.gpu = "H100"
    if args.gpu_memory is None:
        args.gpu_memory = GPUS[args.gpu][0]
    return args


def positive(text):
    value = int(text)
    if value < 1:
        raise ValueError
    return value


if __name__ == "__main__":
    main(parse_args())

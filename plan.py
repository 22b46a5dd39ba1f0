"""Finds the stages that fit a model on your GPUs, and prints the command of the fastest.

    python plan.py -m Qwen/Qwen3-0.6B --gpu-memory 24
    python plan.py -m Qwen/Qwen3-8B --gpu H100 --gpus 8 -s 4096 --tokens 1e9
    python plan.py -m meta-llama/Llama-3.1-70B --gpu H100 --gpus 8 --nodes 4 -s 8192

Only the config of the model is read. Memory is computed for the defaults of the scripts on a GPU,
bf16 and compiled blocks, by formulas that chapters 01, 03, 07, 08 and 09 derive. They hold for
models with the blocks of Llama, Mistral, Qwen2 and Qwen3. For other models, only the state and the
logits are known. Speeds are estimates: a share of the GPU's peak (--peak-share), and links at their
usual speed.
"""

import argparse
import json
import math
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.modeling_layers import GradientCheckpointingLayer

from logs_and_checkpoints import fail

# GB of a GPU; GB/s at which it sends to another GPU of its machine, by NVLink or, from L40S on, by
# PCIe x16; and its share of the network of a usual machine, in Gbit/s. A GB is 1e9 bytes. Sources:
# NVIDIA's data sheets.
GPUS = {"H100": (80, 450, 400), "H200": (141, 450, 400), "B200": (180, 900, 400)}
GPUS |= {"A100": (80, 300, 200)}
GPUS |= {"L40S": (48, 32, 12.5), "L4": (24, 32, 12.5), "A10": (24, 32, 12.5)}
GPUS |= {"RTX 3090": (24, 32, 12.5), "RTX 4090": (24, 32, 12.5), "RTX 5090": (32, 64, 12.5)}
# Peak TFLOP/s of dense bf16 matrix products with fp32 accumulation (T4: fp16), from NVIDIA's data
# sheets and, for GeForce, white papers. The first pattern that is found in the device's name
# counts. $ is the end of the name: "RTX 4090 Laptop GPU" is another chip.
PEAK_TFLOPS = {"T4$": 65, "A10$": 125, "A10G": 70, "L4$": 121, "L40S": 362, "A100": 312}
PEAK_TFLOPS |= {"RTX 3090$": 71, "RTX 4090$": 165.2, "RTX 5090$": 209.5}
PEAK_TFLOPS |= {"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200 NVL": 835, "H200": 989}
PEAK_TFLOPS |= {"GB[23]00": 2500, "B[23]00": 2250}
# What configs call the number of experts in a mixture of experts, and of those that a token uses.
NUM_EXPERTS = "num_local_experts num_experts n_routed_experts moe_num_experts"
EXPERTS_PER_TOKEN = "num_experts_per_tok num_experts_per_token top_k_experts moe_topk moe_k"
# The share of a link's speed that collectives reach.
LINK_SHARE = 0.8
# The share of a GPU's memory that plans may use. On an H100 the peaks of what PyTorch's tensors
# use were at most 0.1 GB above the formulas in stage 01 (outputs/measured/gpu.md). CUDA and its
# libraries, buffers of NCCL, and what the allocator holds without using it come on top.
MEMORY_SHARE = 0.9
# Types of models whose blocks keep what the formulas say.
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
BF16, FP32 = 2, 4  # bytes
TINY = Path(__file__).parent / "tiny"


@dataclass
class Model:
    """The sizes of a model, in numbers of parameters.

    In a mixture of experts, a block has `num_experts` experts, with `in_experts` parameters in all,
    of which a token uses `experts_per_token` experts."""

    config: transformers.PretrainedConfig
    num_parameters: int
    in_blocks: int
    in_largest_block: int
    num_blocks: int
    flops_per_token: float  # forward and backward pass
    in_experts: int = 0
    num_experts: int = 0
    experts_per_token: int = 0

    @property
    def in_root(self):
        """Parameters outside the blocks, such as the embeddings."""
        return self.num_parameters - self.in_blocks

    @property
    def is_known(self):
        """Whether the formulas for activations hold."""
        return self.config.model_type in LLAMA_LIKE


@dataclass
class Split:
    """How a stage divides a model and its data over the ranks, which have a GPU each.

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
    path = TINY if name == "tiny" else name
    try:
        config = transformers.AutoConfig.from_pretrained(path).get_text_config()
    except Exception as error:  # of several types
        reason = f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
        fail(f"--model-name {name}: AutoConfig cannot load it: {reason}")
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = config.model_type
        fail(f"--model-name {name}: transformers has no language model of type {kind}")
    files = {path.name for path in Path(path).glob("[!.]*")}
    is_config_alone = files and not any(file.endswith((".safetensors", ".bin")) for file in files)
    args.from_scratch = args.from_scratch or (name != "tiny" and is_config_alone)
    longest = getattr(config, "max_position_embeddings", None) or sys.maxsize
    args.seq_length = args.seq_length or min(1024, longest)
    if not 2 <= args.seq_length <= longest:
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
    return Model(
        config=config,
        num_parameters=model.num_parameters(),
        in_blocks=sum(sizes),
        in_largest_block=max(sizes, default=0),
        num_blocks=len(blocks),
        flops_per_token=flops_per_token(model, seq_length),
        **experts_of(model),
    )


def experts_of(model):
    """The fields of `Model` for a mixture whose experts stage 10 can split: their parameters have
    the experts in dimension 0."""
    per_token = [name for name in EXPERTS_PER_TOKEN.split() if hasattr(model.config, name)]
    for module in model.modules():
        if hasattr(module, "has_gate") and per_token:
            parameters = list(module.parameters())
            if all(len(parameter) == module.num_experts for parameter in parameters):
                return {
                    "in_experts": sum(parameter.numel() for parameter in parameters),
                    "num_experts": module.num_experts,
                    "experts_per_token": getattr(model.config, per_token[0]),
                }
    return {}


def peak_flops(device_name):
    """Peak FLOP/s of a device. 0 if it is unknown, or a part of a GPU (MIG)."""
    for pattern, tflops in PEAK_TFLOPS.items():
        if re.search(pattern, device_name) and "MIG" not in device_name:
            return tflops * 1e12
    return 0


def flops_per_token(model, seq_length):
    """Floating-point operations per token, forward and backward (PaLM, arXiv:2204.02311, app. B).

    6 N + 12 L H D T, for L layers, H heads of D dimensions, T tokens. N are the parameters that a
    token uses: of the embeddings those that are also the output layer, of the experts its own.
    """
    config = model.config
    embeddings = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    embeddings.discard(model.get_output_embeddings().weight)
    parameters = model.num_parameters() - sum(weight.numel() for weight in embeddings)

    num_experts = next(filter(None, (getattr(config, n, 0) for n in NUM_EXPERTS.split())), 1)
    used = next(filter(None, (getattr(config, n, 0) for n in EXPERTS_PER_TOKEN.split())), 1)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    parameters -= experts * (1 - used / num_experts)

    heads = getattr(config, "num_attention_heads", 0)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size / max(heads, 1)
    return 6 * parameters + 12 * config.num_hidden_layers * heads * head_dim * seq_length


# What can be run, and the best of it


def plans_of(model, args):
    """All plans: what fits before what does not, and the fastest first."""
    if args.global_batch_size is None:  # a micro-batch of about 4096 tokens for each GPU
        sequences = args.gpus * args.nodes * max(1, 4096 // args.seq_length)
        args.global_batch_size = max(8, sequences)
    # If the activations are not known, only plans with activation checkpointing are made.
    recompute = (False, True) if model.is_known else (True,)
    plans = [plan(model, args, split, how) for split in splits(model, args) for how in recompute]
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
        if args.gpus % size == 0 and model.config.num_key_value_heads % size == 0:
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
    sequences = math.ceil(args.global_batch_size / ranks)  # of a rank, in a step

    def memory(batch_size):
        tokens, num_micro_batches = batch_size * args.seq_length, math.ceil(sequences / batch_size)
        if split.stage in ("01-single-gpu", "02-ddp"):
            return memory_of_a_whole_copy(model, tokens, recompute)
        if split.num_stages > 1:
            return memory_of_a_pipeline(model, tokens, recompute, split, num_micro_batches)
        whole = Part(model.num_blocks, model.in_blocks, model.in_root)
        return memory_with_fsdp(model, whole, tokens, recompute, split, num_micro_batches)

    def time(batch_size):
        return time_of_a_step(model, args, split, recompute, batch_size, sequences)

    # Fewer micro-batches can need less memory than many, so each size is tried.
    sizes = [size for size in range(sequences, 0, -1) if fits(memory(size), args)]
    largest_batch_size = max(sizes, default=0)
    while largest_batch_size < 1024 and fits(memory(largest_batch_size + 1), args):
        largest_batch_size += 1
    batch_size = min(sizes or [1], key=lambda size: time(size)[2] or 0)  # the largest of equal ones
    # Micro-batches of equal size.
    batch_size = math.ceil(sequences / math.ceil(sequences / batch_size))
    if not model.is_known:
        batch_size = 1

    parts = memory(batch_size)
    sent, seconds_of, seconds = time(batch_size)
    flags = [*split.flags, *(["--activation-checkpointing"] if recompute else [])]
    tokens_per_second = args.global_batch_size * args.seq_length / seconds if seconds else None
    result = {
        "stage": split.stage,
        "flags": " ".join(map(str, flags)),
        "fits": bool(sizes),
        "batch_size": batch_size,
        "largest_batch_size": largest_batch_size,
        "gb": {name: size / 1e9 for name, size in parts.items()},
        "total_gb": sum(parts.values()) / 1e9,
        "sent_gb": sum(sent.values()) / 1e9,
        "tokens_per_second": tokens_per_second,
        "seconds": seconds,
        "seconds_of": seconds_of,
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
    is_simple = one["stage"] in ("01-single-gpu", "02-ddp", "03-fsdp", "05-multinode")
    return 1, offload, not is_simple, "--activation-checkpointing" in one["flags"]


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


# Memory of the rank that needs most, in bytes, by part. `tokens` are those of a micro-batch, before
# a tensor group or a context group divides them. With `recompute`, activation checkpointing, a
# block keeps only its input, and is computed again in the backward pass.


def memory_of_a_whole_copy(model, tokens, recompute):
    """Stages 01 and 02. Autocast makes bf16 copies of the weights. If blocks are computed again, it
    makes them for each block anew. Then the peak is at the loss or in a block."""
    config, n = model.config, model.num_parameters
    state = {"parameters": FP32 * n, "gradients": FP32 * n, "moments": 2 * FP32 * n}
    logits = tokens * bytes_of_logits(config)
    output_layer = BF16 * config.vocab_size * config.hidden_size
    if not model.is_known:
        return state | {"copies": output_layer, "activations": 0, "logits": logits}

    block = tokens * bytes_of_an_autocast_block(config)
    # The input of the last norm and that divided by its size, in fp32, and the output in bf16.
    last_norm = tokens * (2 * FP32 + BF16) * config.hidden_size
    if not recompute:
        copies = BF16 * model.in_blocks + output_layer
        activations = model.num_blocks * block + last_norm
        return state | {"copies": copies, "activations": activations, "logits": logits}
    inputs = tokens * model.num_blocks * FP32 * config.hidden_size
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
    of_a_logit = BF16 + 2 * FP32 if tensor_size > 1 else 2 * BF16
    return of_a_logit * config.vocab_size / tensor_size


def bytes_of_last_norm(config, tensor_size=1):
    """Its input in fp32 and bf16, and its output, which a tensor group gathers, for each token."""
    return (FP32 + BF16) * config.hidden_size / tensor_size + BF16 * config.hidden_size


# Communication and time


def time_of_a_step(model, args, split, recompute, batch_size, sequences):
    """Bytes that a GPU sends in a step for FSDP, for averages between machines, and to the ranks of
    a group, as a dict; the seconds of each of these and of the computation, as a dict; and those of
    the step. Seconds are None if the speed of the GPU is not known. `sequences` are those of a rank
    or of the ranks that share them.

    Computation, the communication of FSDP and averages between machines overlap, so the longest of
    them counts. While the ranks of a group send each other something, they compute nothing."""
    n, m = model.num_parameters, math.ceil(sequences / batch_size)
    hidden_states = BF16 * batch_size * args.seq_length * model.config.hidden_size
    shards, passes = split.shards, 3 if recompute else 2
    fsdp = m * sent_by_fsdp(model.in_blocks, model.in_root) / split.tensor_size
    averages = group = 0
    idle = uneven = 1
    if split.stage == "02-ddp":
        shards, fsdp = args.gpus, 2 * FP32 * n
    if split.keep_gathered:
        fsdp = (BF16 + FP32) * n
    if split.stage == "05-multinode":
        replicas = args.gpus * args.nodes // shards
        averages = 2 * FP32 * n / shards * (replicas - 1) / replicas
    if split.tensor_size > 1:
        # In a block four forward and four backward, of which three are repeated to compute it
        # again, and four at the embeddings and the output layer.
        collectives = (11 if recompute else 8) * model.num_blocks + 4
        group = m * collectives * hidden_states * (1 - 1 / split.tensor_size)
    if split.context_size > 1:
        kv = model.config.num_key_value_heads * head_dim(model.config)
        keys_and_values = 2 * BF16 * batch_size * args.seq_length * kv
        group = m * passes * model.num_blocks * keys_and_values * (1 - 1 / split.context_size)
    if split.num_stages > 1:
        parts = parts_of_a_pipeline(model, split.num_stages, m)
        fsdp = m * max(sent_by_fsdp(part.in_blocks, part.in_root) for part in parts)
        group = 2 * m * hidden_states
        idle = (m + split.num_stages - 1) / m
        work = [part.in_blocks + part.has_loss * part.in_root for part in parts]
        uneven = max(work) * len(work) / sum(work)  # all wait for the one with most work
    fsdp *= 1 - 1 / shards
    if split.expert_size > 1:
        elsewhere = 1 - 1 / split.expert_size  # the share of the experts
        fsdp -= m * sent_by_fsdp(model.num_blocks * model.in_experts * elsewhere, 0)
        rows = 2 * passes * model.experts_per_token * hidden_states
        group = m * model.num_blocks * rows * elsewhere
    sent = {"FSDP": fsdp, "averages": averages, "group": group}

    peak = peak_flops(args.gpu or "")
    if not peak or split.offload:
        return sent, None, None
    flops = model.flops_per_token * sequences * args.seq_length / split.ranks_of_a_sequence
    seconds = {
        "computation": (4 / 3 if recompute else 1) * uneven * flops / (peak * args.peak_share),
        "group": group / speed_of_group(split, args),
        "FSDP": fsdp / speed_of_fsdp(split, args),
        "averages": averages / (speed_of_network(args) / args.gpus),
    }
    in_order = seconds["computation"] + seconds["group"]
    return sent, seconds, idle * max(in_order, seconds["FSDP"], seconds["averages"])


# Bytes a second at which a GPU sends, and for the network, a machine.


def speed_of_link(args):
    return LINK_SHARE * GPUS[args.gpu][1] * 1e9


def speed_of_network(args):
    usual = GPUS[args.gpu][2] * args.gpus
    return LINK_SHARE * (usual if args.network is None else args.network) * 1e9 / 8


def speed_of_fsdp(split, args):
    """A ring through the GPUs of several machines leaves each machine once. The GPUs of a tensor
    group are in as many rings, and so are those of an expert group with their experts."""
    if split.shards * split.tensor_size <= args.gpus:
        return speed_of_link(args)
    rings = split.tensor_size * min(split.expert_size, args.gpus)
    return min(speed_of_link(args), speed_of_network(args) / rings)


def speed_of_group(split, args):
    """Between neighbors in a pipeline, or within a group."""
    gpus, size = args.gpus, max(split.context_size, split.expert_size)
    if args.nodes == 1 or split.num_stages == 1 and gpus % size == 0:
        return speed_of_link(args)
    if split.context_size > 1:  # a ring
        return min(speed_of_link(args), speed_of_network(args))
    # All GPUs of a machine send to other machines: rows those that do not stay in the machine.
    leave = (size - gpus) / (size - 1) if size > gpus else 1
    return min(speed_of_link(args), speed_of_network(args) / gpus / leave)


def sent_by_fsdp(in_blocks, in_root):
    """Bytes for a micro-batch, without the factor 1 - 1/S of S shards: blocks are gathered twice
    and the root once, in bf16, and the gradients of both are reduce-scattered in fp32."""
    return (2 * BF16 + FP32) * in_blocks + (BF16 + FP32) * in_root


# What is printed


def describe(model, args):
    return {
        "model": args.model_name,
        "parameters": model.num_parameters,
        "activations_are_known": model.is_known,
        "gpu": args.gpu,
        "gpus": args.gpus,
        "nodes": args.nodes,
        "gpu_memory_gb": args.gpu_memory,
        "planned_gb": MEMORY_SHARE * args.gpu_memory,
        "peak_share": args.peak_share,
        "sequence_length": args.seq_length,
        "global_batch_size": args.global_batch_size,
        "cpu_memory_of_rank_0_gb": FP32 * model.num_parameters / 1e9,
        "checkpoint_gb": 3 * FP32 * model.num_parameters / 1e9,
    }


def answer(model, args, plans):
    """Prints what fits, what does not, and the command of the fastest plan."""
    gpus = f"{args.nodes} × {args.gpus}" if args.nodes > 1 else args.gpus
    planned = MEMORY_SHARE * args.gpu_memory
    print(f"{args.model_name}: {model.num_parameters:,} parameters, {model.num_blocks} blocks")
    print(f"{gpus} GPU(s) with {args.gpu_memory:g} GB each. Plans use at most {planned:.1f} GB.")
    print("The rest is for CUDA, NCCL and what PyTorch's allocator holds without using it.")
    print(f"A step has {args.global_batch_size} sequences of {args.seq_length} tokens.\n")

    best = {}
    for one in plans:
        best.setdefault((one["stage"], one["flags"] if args.all else None), one)
    fitting = [one for one in best.values() if one["fits"]]
    if fitting:
        print(table(fitting, args))
        print(legend(model, args))
    for stage in dict.fromkeys(one["stage"] for one in plans):
        of_stage = [one for one in plans if one["stage"] == stage]
        if not any(one["fits"] for one in of_stage):
            smallest = min(of_stage, key=lambda one: one["total_gb"])
            total, how = smallest["total_gb"], f"{stage} {smallest['flags']} -b 1"
            print(f"{how} needs {total:.1f} GB, which is {total - planned:.1f} GB too much.")
    waiting = [one["stage"] for one in fitting if waits_for_averages(one)]
    if waiting:
        print(f"{waiting[0]} waits for averages between machines. With --compression int8 it sends")
        print("a quarter of these bytes (chapter 04).")
    if not fitting:
        print(what_would_help(model, args))
        return

    first = fitting[0]
    print(f"\n{first['command']}\n")
    if args.nodes > 1:
        print("Run this on every machine, with the address of the first one in place of HOST.")
    whole = FP32 * model.num_parameters / 1e9
    print(f"CPU memory of rank 0, to load and to export: {whole:.1f} GB")
    if "--cpu-offload" in first["flags"]:
        print(f"CPU memory of the machine, for the state: {4 * whole:.1f} GB")
    print(f"disk, for each checkpoint: {3 * whole:.1f} GB")


def waits_for_averages(one):
    seconds = one["seconds_of"]
    return seconds is not None and seconds["averages"] == max(seconds.values())


def table(plans, args):
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


def legend(model, args):
    """What the columns mean."""
    lines = ["GB are those of the GPU that needs most, when it needs most: state (parameters,"]
    lines += ["gradients and moments in fp32), copies (weights in bf16, and gradients that are not"]
    lines += ["averaged yet), activations and logits."]
    if not model.is_known:
        kind = model.config.model_type
        lines += [f"Activations of {kind} are not known and come on top, so a plan may not fit."]
        lines += ["With -b 1 a run is slow: raise it while memory/peak_gb allows it."]
    if args.gpu:
        lines += [f"Speeds are estimates, with {args.peak_share:.0%} of the GPU's peak, and"]
        lines += [f"{LINK_SHARE:.0%} of that of links. Those of --cpu-offload are not known."]
    else:
        lines += ["Speeds need --gpu. Without it, the order is a rule of thumb."]
    return "\n".join(lines) + "\n"


def what_would_help(model, args):
    """The longest shorter sequence, and the smallest larger number of GPUs, with which some plan
    fits."""
    found = []
    length = args.seq_length // 2
    while length >= 64 and not any_fits(model, args, seq_length=length):
        length //= 2
    if length >= 64:
        found.append(f"-s {length}")
    gpus, nodes = args.gpus, args.nodes
    while gpus * nodes < 1024:
        gpus, nodes = (2 * gpus, nodes) if gpus < 8 else (gpus, 2 * nodes)
        if any_fits(model, args, gpus=gpus, nodes=nodes):
            found.append(f"--gpus {gpus} --nodes {nodes}")
            break
    if not found:
        return "Neither shorter sequences nor more GPUs make it fit."
    return f"It would fit with {' or with '.join(found)}."


def any_fits(model, args, **changes):
    args = argparse.Namespace(**vars(args) | {"global_batch_size": None} | changes)
    return any(one["fits"] for one in plans_of(model, args))


def parse_args(given=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-m", "--model-name", default="tiny", help="tiny, a hub id, or a folder")
    add("--gpu", choices=list(GPUS), help="its memory and its speed, default: H100")
    memory_help = "GB of a GPU. Without --gpu no speeds are estimated"
    add("--gpu-memory", type=positive(float), help=memory_help)
    add("--gpus", type=positive(int), default=1, help="of each machine, default: 1")
    add("--nodes", type=positive(int), default=1, help="machines, default: 1")
    network_help = "Gbit/s of each machine, default: what is usual with this GPU"
    add("--network", type=positive(float), help=network_help)
    add("-s", "--seq-length", type=positive(int), help="default: 1024, or the model's limit")
    batch_help = "sequences of a step, default: about 4096 tokens for each GPU, and at least 8"
    add("--global-batch-size", type=positive(int), help=batch_help)
    add("--tokens", type=positive(float), help="of the whole training, for the hours")
    share_help = "of the GPU's peak speed, default: 0.4"
    add("--peak-share", type=positive(float), default=0.4, help=share_help)
    add("-e", "--experiment-name", default="my-run", help="for the command, default: my-run")
    add("-d", "--dataset-name", help="for the command")
    add("--from-scratch", action="store_true", help="for the command")
    add("--all", action="store_true", help="show all plans that fit, not the fastest of each stage")
    add("--json", action="store_true", help="print all plans as JSON")
    args = parser.parse_args(given)
    if args.gpu is None and args.gpu_memory is None:
        args.gpu = "H100"
    if args.gpu_memory is None:
        args.gpu_memory = GPUS[args.gpu][0]
    return args


def positive(kind):
    def number(text):
        if kind(text) <= 0:
            raise ValueError
        return kind(text)

    return number


if __name__ == "__main__":
    main(parse_args())

"""Stage 09: context parallelism. The processes of a group share the tokens of each sequence.

Try it; train on a text of your own; train a pretrained model further. Without -e nothing is saved.

    torchrun --standalone --nproc-per-node 2 train-llm.py
    torchrun --standalone --nproc-per-node 2 train-llm.py -e notes -d notes.txt --max-steps 200
    torchrun --standalone --nproc-per-node 8 train-llm.py -e q3 -d a.txt -m Qwen/Qwen3-0.6B -s 8192
"""

import argparse
import itertools
import json
import math
import os
import sys
import time
import zlib
from datetime import timedelta
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics  # the language reference, a text that comes with Python

# logs_and_checkpoints.py is in the parent folder. That goes first on the path, so that a clone of
# this repository never imports the module of another clone.
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import datasets
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from logs_and_checkpoints import (
    LOCAL_RANK,
    RunLog,
    fail,
    flops_per_token,
    load_checkpoint,
    memory_gb,
    open_run_dir,
    save_checkpoint,
    save_final_model,
    say,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

transformers.logging.set_verbosity_error()  # hides warnings
transformers.logging.disable_progress_bar()
# In each forward pass transformers asks the GPU whether a row is several sequences that must not
# attend to each other, and Python waits for the answer. Here it never is, and None says so.
transformers.masking_utils.find_packed_sequence_indices = lambda position_ids: None

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Defaults. beta2, which is no flag, is the decay rate of AdamW's second moment in each step.
FROM_SCRATCH = {"num_epochs": 10, "lr": 2e-3, "weight_decay": 0.1, "beta2": 0.95}
PRETRAINED = {"num_epochs": 3, "lr": 2e-5, "weight_decay": 0.01, "beta2": 0.999}
# What `-m tiny` means: the config and tokenizer of a small model, without weights.
TINY = ROOT / "tiny"


@record  # torchrun shows the traceback of the process that failed first
def main(args):
    if "RANK" not in os.environ:
        fail("this stage needs torchrun: torchrun --standalone --nproc-per-node 2 train-llm.py")
    device = torch.device(args.device)
    dtype = DTYPES[args.dtype]
    if args.cpu_offload and args.dtype == "fp16":
        fail("--cpu-offload: gradients there are not scaled right in fp16, use another --dtype")
    if args.cpu_offload and device.type == "cpu":
        fail("--cpu-offload: needs a GPU, without one everything is in CPU memory already")
    run_dir = Path(args.save_dir, args.experiment_name) if args.experiment_name else None
    if run_dir:
        open_run_dir(run_dir)

    # torchrun starts this script several times, usually once for each GPU, and every process runs
    # all of it. The processes form a process group, in which each has a number, its rank, from 0 to
    # world_size - 1. They communicate through collectives: operations that every rank must call,
    # such as all_reduce, which gives every rank the sum of a tensor over all ranks. On GPUs they
    # are implemented by NCCL, NVIDIA's library, and on the CPU by Gloo, which comes with PyTorch.
    # A collective fails when it waits for longer than a timeout, but loading data or a model may
    # take hours.
    timeout = timedelta(hours=12)
    if device.type == "cuda":
        # The local rank is the number of a process on its machine. Each takes a GPU of its own.
        device = torch.device("cuda", LOCAL_RANK)
        torch.cuda.set_device(device)
        # With --cpu-offload gradients are in CPU memory, and so are the norms that the ranks add up
        # to clip them. NCCL cannot do this, Gloo can.
        backend = "cpu:gloo,cuda:nccl" if args.cpu_offload else "nccl"
        dist.init_process_group(backend, device_id=device, timeout=timeout)
    else:
        dist.init_process_group("gloo", timeout=timeout)

    # Data: sequences of one length, cut from the documents.
    config = load_config(args.model_name)
    tokenizer = load_tokenizer(args.model_name, args.dataset_name)
    # The first rank of each machine tokenizes, and then the others read the result from the cache.
    # A barrier is a collective that returns when every rank has called it.
    if LOCAL_RANK > 0:
        dist.barrier()
    train_data, eval_data, seq_length = load_data(args, config, tokenizer)
    if LOCAL_RANK == 0:
        dist.barrier()
    experiment = check_data(args, config, train_data, eval_data, seq_length)
    eval_data = eval_data.select(range(min(len(eval_data), args.eval_sequences)))

    # A mesh is a table of the ranks. Those that differ in one of its dimensions alone form a group.
    #   "shard": they train on different tokens, and have different shards of the same parameters.
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    # A second mesh is for the data. Ranks with consecutive numbers differ in its last dimension.
    #   "data": they train on different sequences.
    #   "context": they have different tokens of each sequence, and communicate in every block.
    world_size, context_size = dist.get_world_size(), args.context_size
    if world_size % context_size > 0:
        fail(f"--context-size {context_size}: does not divide {world_size} processes")
    if seq_length % (2 * context_size) > 0:
        fail(f"--seq-length {seq_length}: must be a multiple of twice --context-size")
    token_mesh = init_device_mesh(
        device.type, (world_size // context_size, context_size), mesh_dim_names=("data", "context")
    )
    own = own_positions(seq_length, token_mesh["context"])
    # The ranks that share the work of a global batch.
    data_group = token_mesh.get_group("data")
    num_shares = dist.get_world_size(data_group)

    # An optimizer step trains on one global batch. An epoch is one pass over the training data. The
    # sequences left over at its end, fewer than a batch, are skipped.
    steps_per_epoch = len(train_data) // args.global_batch_size
    total_steps = args.num_epochs * steps_per_epoch
    if args.max_steps:
        total_steps = min(total_steps, args.max_steps)
    say(
        f"{args.dataset_name}: {len(train_data)} sequences of {seq_length} tokens and "
        f"{len(eval_data)} held out, {total_steps} steps"
    )

    # A global batch is usually too large for the memory of the device. So it is split into
    # micro-batches, whose gradients are added up before the update (gradient accumulation).
    # The batch is divided into shares before that, one for each rank of the data group. So the
    # number of ranks does not change what a step trains on.
    sequences_per_share = math.ceil(args.global_batch_size / num_shares)
    grad_accum_steps = math.ceil(sequences_per_share / args.batch_size)
    say(
        f"{args.global_batch_size} sequences per step = "
        f"{num_shares} share(s) × "
        f"{grad_accum_steps} micro-batch(es) of at most {args.batch_size}"
    )

    # Model. Its parameters are fp32 whatever the dtype: with the 8 bits of precision that bf16 has,
    # small updates would be rounded away.
    # The model may be too large for one GPU, and for the CPU if all ranks load it. So rank 0 alone
    # does. The others build it on the meta device, where tensors have a shape but no storage.
    is_rank_0 = dist.get_rank() == 0
    weights = None if args.from_scratch else args.model_name
    export_dtype = (weights and config.dtype) or torch.float32  # that of the pretrained weights
    with torch.device("cpu" if is_rank_0 else "meta"):
        model = load_model(config, weights if is_rank_0 else None, args.attn, args.seed)
    full_weights = model.state_dict()
    flops = flops_per_token(model, seq_length)
    say(
        f"{model.num_parameters():,} parameters, {'pretrained' if weights else 'random'} weights, "
        f"{model.config._attn_implementation}, {args.dtype}, {device}"
    )

    # The transformer blocks. In most models of transformers, the library, they are of this class.
    blocks = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not blocks:
        fail(f"--model-name {args.model_name}: no transformer blocks were found in it")

    # Context parallelism: of all layers, only attention needs tokens that a rank does not have.
    split_attention(model, token_mesh["context"])

    # torch.compile compiles the first block and uses the result for the others: their code is the
    # same. Compiling the whole model would take many times as long. The loss is compiled too: its
    # intermediate results are the largest tensors of a step, and compiled code never stores them.
    # Each size of a micro-batch has its own code (`dynamic=False`), which is faster.
    loss_fn = sum_cross_entropy
    if args.compile:
        torch._dynamo.config.recompile_limit = 8 * len(blocks)  # by default it gives up after 8
        for block in blocks:
            block.forward = torch.compile(block.forward, dynamic=False)
        loss_fn = torch.compile(sum_cross_entropy, dynamic=False)

    # Activation checkpointing keeps only the input of each block. In the backward pass it computes
    # the other activations a second time. No block draws random numbers, as dropout is 0, so the
    # state of the random number generator need not be kept for that.
    if args.activation_checkpointing:
        for block in blocks:
            block.forward = partial(
                checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
            )

    # Sharding: each rank keeps an equal part of its parameters, its shards. FSDP gathers those of a
    # block from the shard group before its forward pass, frees them after it, and gathers them
    # again for its backward pass. Then it averages the gradients of the block over the shard group,
    # and each rank keeps those of its shards. So besides its shards a GPU holds the parameters and
    # gradients of a few blocks at a time, and those outside the blocks, such as the embeddings.
    # These belong to the model itself, the root module, which is therefore last in the loop.
    #
    # Mixed precision: parameters are gathered in `dtype`, so the model computes in it, except where
    # it casts to fp32 itself. Gradients are averaged and the loss is computed in fp32, as before.
    mixed_precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy() if args.cpu_offload else OffloadPolicy()
    for module in [*blocks, model]:
        fully_shard(module, mesh=mesh["shard"], mp_policy=mixed_precision, offload_policy=offload)
    if args.no_reshard_after_forward:
        model.set_reshard_after_forward(False)
    send_weights(model, full_weights, device, args.cpu_offload)
    del full_weights

    def forward(input_ids, positions=own):
        """Logits, (B, T / C, V), of a rank's token ids, (B, T / C), at positions, (T / C,)."""
        logits = model(input_ids=input_ids, position_ids=positions[None], use_cache=False).logits
        if not torch.is_grad_enabled():
            model.reshard()  # the root module stays gathered until a backward pass
        return logits

    # Optimizer. Matrices, embeddings among them, have weight decay. Biases and norm weights do not.
    # `fused` updates all parameters in a few kernels instead of several for each parameter.
    matrices = [p for n, p in model.named_parameters() if p.ndim >= 2 and not n.endswith("bias")]
    vectors = [p for n, p in model.named_parameters() if p.ndim < 2 or n.endswith("bias")]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, args.lr, (0.9, args.beta2), fused=True)

    # The learning rate rises in the warm-up. AdamW's first updates are as large as later ones, but
    # their direction is uncertain: its moments are still means of only a few gradients.
    warmup_steps = args.warmup_steps
    if warmup_steps is None:
        warmup_steps = min(100, total_steps // 10)

    # fp16 cannot represent small gradients. The scaler multiplies the loss by a large number before
    # the backward pass, and divides the gradients by it afterwards. In bf16 and fp32 it is off.
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "fp16")

    # Resume from the newest checkpoint of this run, if there is one. It must be of the same
    # experiment. Everything else may change: hardware, other flags, and the stage, except to 06.
    flags = {**vars(args), "seq_length": seq_length, "warmup_steps": warmup_steps}
    resumed = load_checkpoint(run_dir, model, optimizer, experiment, flags)
    steps_done = resumed["step"]
    if resumed.get("scaler"):
        scaler.load_state_dict(resumed["scaler"])
    log = RunLog(run_dir, steps_done, total_steps, resumed.get("comet_key"), flags, flops)

    for step in range(steps_done + 1, total_steps + 1):
        # Data. The seed and the epoch alone decide the order of an epoch's sequences, and the step
        # decides which of them form its global batch. So a resumed run continues exactly where it
        # was, without any state of a data loader.
        epoch, step_in_epoch = divmod(step - 1, steps_per_epoch)
        if step_in_epoch == 0 or step == steps_done + 1:
            order = np.random.default_rng((args.seed, epoch)).permutation(len(train_data))
        start = step_in_epoch * args.global_batch_size
        indices = order[start : start + args.global_batch_size]

        micro_batches, num_targets = make_micro_batches(
            train_data, indices, args.batch_size, device, data_group
        )
        dist.all_reduce(num_targets, group=data_group)  # each rank now has the sum of all
        num_targets.clamp_(min=1)  # a batch without any target has loss 0, not 0 / 0
        # Of each sequence a rank trains on its own tokens.
        micro_batches = [(x[:, own], targets[:, own]) for x, targets in micro_batches]
        log.lap("data")

        # Forward and backward. The gradients of all micro-batches add up.
        step_loss = torch.zeros((), device=device)
        for i, (input_ids, targets) in enumerate(micro_batches):
            # Averaging gradients once per step is enough, in the last backward pass.
            is_last = i == len(micro_batches) - 1
            # But until then a rank would keep whole gradients, not just those of its shards. So all
            # backward passes average, except with --no-reshard-after-forward, which uses memory to
            # communicate less.
            if args.no_reshard_after_forward:
                model.set_requires_gradient_sync(is_last)
                model.set_reshard_after_backward(is_last)

            loss = loss_fn(forward(input_ids), targets)
            step_loss += loss.detach()
            log.lap("forward")

            # Divide by the number of targets in the whole global batch, not in the micro-batch.
            # Then every target has the same weight, even if some micro-batches have fewer of them,
            # and the result does not depend on --batch-size.
            # `num_targets` counts the targets of all shares, so their gradients must be added up.
            # FSDP averages them over all ranks instead: multiply by world_size to get the sum.
            scaler.scale(loss * world_size / num_targets).backward()
            log.lap("backward")

        # Update. The gradients are clipped to a norm of at most max_grad_norm, so that one unusual
        # batch does not dominate the moments of AdamW for many steps.
        scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        lr = args.lr * lr_factor(step, args.lr_scheduler, args.lr_cycles, warmup_steps, total_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        scaler.step(optimizer)
        scaler.update()
        log.lap("update")

        # Log. Reading a value (.item(), .tolist()) waits until the GPU has computed it, so this is
        # done only in the steps that are logged.
        metrics = {}
        is_last_step = step == total_steps
        is_save_step = run_dir and (step % args.ckpt_freq == 0 or is_last_step)
        if step == steps_done + 1 or step % args.log_freq == 0 or is_save_step or is_last_step:
            dist.all_reduce(step_loss)  # each rank has the loss of its own tokens
            grad_norm = grad_norm.full_tensor()  # the norms of all shards combined
            metrics = {
                "train/loss": step_loss.item() / num_targets.item(),
                "train/grad_norm": grad_norm.item(),
                "train/learning_rate": lr,
                "train/epoch": step / steps_per_epoch,
                "train/tokens_seen": step * args.global_batch_size * seq_length,
                **log.pop_times(),
                **memory_gb(model, optimizer, device),
            }
            check_finite(step, metrics, scaler)
        log.step(step, metrics)
        optimizer.zero_grad()  # otherwise the next step would add to these gradients
        log.lap("log")  # counted in the next log line: the times of this one are read already

        # Checkpoint: model and optimizer, and what else is needed to resume.
        if is_save_step:
            values = {
                "experiment": experiment,
                "flags": flags,
                "comet_key": log.comet_key,
                "scaler": scaler.state_dict(),
            }
            save_checkpoint(run_dir, step, model, optimizer, values, args.keep_checkpoints)

        # Evaluate on text that the model was not trained on.
        if args.eval_freq and step % args.eval_freq == 0 and not is_last_step:
            results = evaluate(
                forward, eval_data, args.batch_size, device, loss_fn, data_group, own
            )
            log.step(step, results)
        log.lap("outside")  # what is outside of a step does not count for tokens per second

    # Evaluate the trained model, and show what it writes. Then export it for `from_pretrained`.
    # Each token gathers all parameters again, so the sample is shorter than in stages 01 and 02.
    results = evaluate(forward, eval_data, args.batch_size, device, loss_fn, data_group, own)
    prompt, text = sample(forward, eval_data[0], 64, tokenizer, device, token_mesh["context"])
    log.step(log.last_step, results)
    say(f"prompt, from text that the model was not trained on: {prompt}")
    say(f"what the model writes after it: {text}")
    if run_dir:
        save_final_model(run_dir, model, tokenizer, export_dtype)
    log.close()


def split_attention(model, mesh):
    """Makes `attend` the attention of a model whose tokens are split over the ranks of a group.

    A model of transformers looks up two functions by the name of its attention: one computes the
    attention of a block, and the other makes the masks for it."""
    config = model.config
    kinds = {config._attn_implementation, *(getattr(config, "layer_types", None) or ())}
    # The frequencies of this kind of rotary embedding depend on the last position of a rank.
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "longrope":
        kinds.add("longrope")
    if unknown := ", ".join(sorted(kinds - {"sdpa", "full_attention"})):
        fail(f"--model-name, --attn: attention of kind {unknown} cannot be split, use 03-fsdp")
    transformers.AttentionInterface.register("context", partial(attend, mesh=mesh))
    transformers.AttentionMaskInterface.register("context", make_no_mask)
    model.set_attn_implementation("context")
    if config._attn_implementation != "context":
        fail(f"--model-name: the attention of {config.model_type} cannot be replaced, use 03-fsdp")


@torch.compiler.disable  # each rank would have other code, with its chunk numbers as constants
def attend(module, query, key, value, attention_mask, scaling=None, *, mesh, **kwargs):
    """Attention of the tokens of this rank to themselves and all tokens before them.

    All three tensors are (B, heads, T / C, head size), because C ranks share T tokens. `query` may
    have more heads than the others. Returns (B, T / C, heads, head size), and no weights."""
    if attention_mask is not None:
        fail("--model-name: its attention makes a mask of its own, use 03-fsdp")
    key, value = gather_tokens(key, mesh), gather_tokens(value, mesh)
    outputs = []
    for q, chunk in zip(query.chunk(2, dim=2), own_chunks(mesh), strict=True):
        # A chunk needs the keys up to that of its own last token. This token sees all of them, the
        # one before it all but one, and so on: the diagonal of the mask ends in the lower right
        # corner. That of `is_causal` begins in the upper left one.
        length = q.shape[2]
        end = (chunk + 1) * length
        k, v = key[:, :, :end], value[:, :, :end]
        mask = causal_lower_right(length, end)
        output = F.scaled_dot_product_attention(q, k, v, mask, scale=scaling, enable_gqa=True)
        outputs.append(output.transpose(1, 2))
    return torch.cat(outputs, dim=1), None


def make_no_mask(mask_function, **kwargs):
    """Makes no mask: `attend` has the causal one. Ends the run if a model needs another one."""
    if mask_function is not transformers.masking_utils.causal_mask_function:
        fail("--model-name: its tokens do not see all tokens before them, use 03-fsdp")


def gather_tokens(tensor, mesh):
    """Gathers keys or values, (B, heads, T / C, head size), of all T tokens (all-gather).

    In the backward pass each rank has gradients for all of them, from its own queries (`Partial`).
    They are added up, and each rank gets the sums for its own tokens (reduce-scatter)."""
    # The tensors of all ranks as one DTensor, stacked: (C, B, heads, T / C, head size).
    parts = DTensor.from_local(tensor[None], mesh, [Shard(0)])
    first, second = parts.full_tensor(grad_placements=[Partial()]).chunk(2, dim=3)
    # With two ranks, `first` has the chunks 0 and 1, and `second` has 3 and 2.
    return torch.cat(first.unbind() + second.unbind()[::-1], dim=2)


def own_chunks(mesh):
    """The numbers of the two chunks of each sequence that this rank has. There are 2 C of them.

    The later a token, the more tokens it sees. So for equal work the first rank has the first chunk
    and the last one, the second rank has the second and the last but one, and so on."""
    rank = mesh.get_local_rank()
    return rank, 2 * mesh.size() - 1 - rank


def own_positions(length, mesh):
    """The positions of this rank's tokens, of `length`: an int64 tensor, (length / C,)."""
    chunks = torch.arange(length, device=mesh.device_type).chunk(2 * mesh.size())
    return torch.cat([chunks[i] for i in own_chunks(mesh)])


def share_of_rank(indices, group):
    """Returns this rank's part of `indices`, and how many of its entries count.

    A backward pass may contain collectives, for which all ranks wait. So every rank gets the same
    number of micro-batches. If the indices cannot be divided equally, the ranks that have one fewer
    repeat a sequence that does not count: all its targets are -100, without a loss."""
    rank, num_shares = dist.get_rank(group), dist.get_world_size(group)
    share = list(indices[rank::num_shares])
    num_real = len(share)
    if num_real < math.ceil(len(indices) / num_shares):
        share.append(indices[0])
    return share, num_real


def make_micro_batches(data, indices, batch_size, device, group):
    """Loads this rank's share of the sequences with these indices, in micro-batches.

    Returns a list of (input_ids, targets), int64 tensors of shape (B, T) on the device, and the
    number of targets, a scalar there. targets[:, i] is the token that follows input_ids[:, i], or
    -100 where the loss leaves it out."""
    share, num_real = share_of_rank(indices, group)
    micro_batches = []
    num_targets = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, len(share), batch_size):
        rows = data[share[start : start + batch_size]]
        input_ids = rows["input_ids"]
        labels = rows.get("labels", input_ids)
        targets = F.pad(labels[:, 1:], (0, 1), value=-100)  # nothing follows the last token
        targets[num_real - start :] = -100  # of the sequence that does not count

        # From pinned memory the copy to the GPU is asynchronous: Python does not wait for it.
        if device.type == "cuda":
            input_ids = input_ids.pin_memory().to(device, non_blocking=True)
            targets = targets.pin_memory().to(device, non_blocking=True)
        micro_batches.append((input_ids, targets))
        num_targets += (targets != -100).sum()
    return micro_batches, num_targets


def sum_cross_entropy(logits, targets):
    """The sum of the loss over all targets in nats, computed in fp32: a scalar.

    Shapes: logits (B, T, V), targets (B, T)."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


def lr_factor(step, schedule, cycles, warmup_steps, total_steps):
    """The learning rate of a step as a share of --lr. It needs no state of the steps before.

    Steps count from 1. The share rises in the steps of the warm-up, is 1 in the one after it, and
    then is constant, or falls from 1, so that it would be 0 one step later, in each of `cycles`."""
    if step <= warmup_steps:
        return step / (warmup_steps + 1)
    if schedule == "constant":
        return 1.0
    progress = cycles * (step - 1 - warmup_steps) / (total_steps - warmup_steps) % 1
    if schedule == "linear":
        return 1 - progress
    return (1 + math.cos(math.pi * progress)) / 2


def check_finite(step, metrics, scaler):
    """Ends the run if loss or gradient is not finite: its checkpoints would replace good ones."""
    loss, grad_norm = metrics["train/loss"], metrics["train/grad_norm"]
    # In fp16 the scaler finds such gradients, and skips the update.
    norm_is_fine = math.isfinite(grad_norm) or scaler.is_enabled()
    if not (math.isfinite(loss) and norm_is_fine):
        fail(f"step {step}: the loss is {loss}, the gradient norm {grad_norm}: try a lower --lr")


@torch.no_grad()
def evaluate(forward, data, batch_size, device, loss_fn, group, own):
    """Mean loss over the targets of `data` in nats, and the perplexity, as metrics.

    There is no model.eval(): dropout is 0 in training too."""
    total = torch.zeros((), device=device)
    num_targets = torch.zeros((), dtype=torch.int64, device=device)
    indices = range(len(data))
    global_batch_size = batch_size * dist.get_world_size(group)
    for start in range(0, len(data), global_batch_size):
        batch = indices[start : start + global_batch_size]
        [(input_ids, targets)], count = make_micro_batches(data, batch, batch_size, device, group)
        total += loss_fn(forward(input_ids[:, own]), targets[:, own])
        num_targets += count
    dist.all_reduce(total)  # each rank has the loss of its own tokens
    dist.all_reduce(num_targets, group=group)
    loss = (total / num_targets).item()  # NaN if there is no target
    return {"eval/loss": loss, "eval/perplexity": float(np.exp(loss))}


@torch.no_grad()
def sample(forward, row, num_tokens, tokenizer, device, mesh):
    """Returns a prompt, the beginning of a row of data, and what the model writes after it.

    The prompt ends where an answer begins or, if all of the row is text, after 32 tokens."""
    is_target = row.get("labels", row["input_ids"]) != -100
    answers = (is_target[1:] & ~is_target[:-1]).nonzero() + 1  # where they begin
    start = answers[0].item() if len(answers) else min(32, len(is_target) // 2)
    num_chunks = 2 * mesh.size()
    length = math.ceil((start + num_tokens) / num_chunks) * num_chunks  # so that it can be split
    tokens = row["input_ids"][None, :length].to(device, copy=True)
    tokens[:, start:] = 0
    own = own_positions(tokens.shape[1], mesh)

    generator = torch.Generator().manual_seed(0)
    for i in range(start, tokens.shape[1]):
        # Tokens that are not written yet are 0. Attention is causal: no earlier token reads them.
        # One rank has the logits of token i - 1. On the others this is a sum of nothing, 0.
        logits = forward(tokens[:, own], own)[0, own == i - 1].sum(0)
        dist.all_reduce(logits, group=mesh.get_group())
        # A temperature below 1, here 0.6, makes likely tokens likelier.
        probabilities = (logits.float().cpu() / 0.6).softmax(0)
        tokens[0, i] = torch.multinomial(probabilities, 1, generator=generator)

    text = tokenizer.decode(tokens[0, start:])
    if tokenizer.eos_token:
        text = text.split(tokenizer.eos_token)[0]
    return tokenizer.decode(tokens[0, :start]), text


def load_config(name):
    """The config of a model, without dropout."""
    config = transformers.AutoConfig.from_pretrained(name)
    config = config.get_text_config()  # the language part of a multimodal model
    config.is_decoder = True  # a BERT would otherwise see the tokens that it has to predict
    # No dropout: its random numbers would depend on how a batch is split.
    for key, value in vars(config).items():
        if value and ("drop" in key or "jitter" in key):
            setattr(config, key, 0.0)
            say(f"{key} is {value} in {name} and 0 here")
    return config


def load_tokenizer(model_name, dataset_name):
    """The tokenizer of the model, or that of prepare.py, which may have added a chat template."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_name)
    # Without files, transformers makes a tokenizer of special tokens only.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        fail(f"--model-name {model_name}: it has no tokenizer, copy the files of one into it")

    prepared = Path(dataset_name, "tokenizer")
    if not prepared.exists():
        return tokenizer
    vocabulary = tokenizer.get_vocab().items()
    tokenizer = transformers.AutoTokenizer.from_pretrained(prepared)
    if not vocabulary <= tokenizer.get_vocab().items():
        fail(f"--dataset-name {dataset_name}: prepared for another tokenizer than {model_name} has")
    return tokenizer


def load_data(args, config, tokenizer):
    """Returns the sequences to train on, those to evaluate on, and their length.

    To evaluate on: the split validation or test, or else the last 5% of the training data."""
    name, path = args.dataset_name, Path(args.dataset_name)
    longest = getattr(config, "max_position_embeddings", sys.maxsize)
    seq_length = args.seq_length or min(1024, longest, tokenizer.model_max_length)
    if name == "python-docs":
        datasets.disable_progress_bars()  # this takes only a second
        splits = {"train": datasets.Dataset.from_dict({"text": python_docs()})}
    elif name == "dummy":
        tokens = np.random.default_rng(0).integers(config.vocab_size, size=(4096, seq_length))
        splits = {"train": datasets.Dataset.from_dict({"input_ids": tokens})}
    elif (path / "train.parquet").exists():  # rows of tokens, from prepare.py
        files = {file.stem: str(file) for file in path.glob("*.parquet")}
        splits = datasets.load_dataset("parquet", data_files=files)
    elif path.suffix == ".txt" and path.exists() and path.stat().st_size <= 50_000_000:
        options = {"sample_by": "document", "encoding": "utf-8-sig"}  # by default, by line
        splits = datasets.load_dataset("text", data_files=name, **options)
    elif path.exists():
        fail(f"--dataset-name {name}: this is not a .txt file of up to 50 MB, run prepare.py on it")
    else:
        splits = datasets.load_dataset(name, args.dataset_subset)

    columns = splits["train"].column_names
    has_tokens = set(columns) in ({"input_ids"}, {"input_ids", "labels"})
    if has_tokens and args.seq_length is None:
        seq_length = len(splits["train"][0]["input_ids"])
    if not has_tokens and args.text_column not in columns:
        choice = f"choose a column of texts with --text-column, of {', '.join(columns)}"
        fail(f"--dataset-name {name}: {choice}, or run prepare.py on it, for chats for example")
    if not has_tokens and len(columns) > 1:
        say(f"training on the column {args.text_column} of {', '.join(columns)}")
    if not 2 <= seq_length <= longest:
        fail(f"--seq-length {seq_length}: {args.model_name} takes from 2 to {longest} tokens")

    held_out = next((split for split in ("validation", "test") if split in splits), None)
    train = pack(splits["train"], args.text_column, tokenizer, seq_length)
    if held_out:
        return train, pack(splits[held_out], args.text_column, tokenizer, seq_length), seq_length
    num_train = len(train) - math.ceil(len(train) / 20)
    return train.select(range(num_train)), train.select(range(num_train, len(train))), seq_length


def python_docs():
    """The texts of the language reference that comes with Python.

    Some contain others. A paragraph is used once, so that none is both trained on and held out."""
    seen, texts = set(), []
    for text in topics.values():
        paragraphs = dict.fromkeys(text.split("\n\n"))  # each once, in their order
        texts.append("\n\n".join(part for part in paragraphs if part not in seen))
        seen.update(paragraphs)
    return texts


def pack(documents, column, tokenizer, seq_length):
    """Joins the tokens of texts and cuts them into sequences of one length (packing).

    Returns a dataset with `input_ids`. A token attends to all before it in its sequence, also of
    other texts. The last tokens, fewer than a sequence, are left out.
    Rows of tokens are sequences already. Their `labels` are -100 where there is no loss."""
    if "input_ids" in documents.column_names:
        return documents.with_format("torch")
    tokens = []  # those that do not fill a sequence yet

    def cut(batch):
        for text_tokens in tokenize(batch[column], tokenizer):
            tokens.extend(text_tokens)
        end = len(tokens) // seq_length * seq_length
        sequences = [tokens[i : i + seq_length] for i in range(0, end, seq_length)]
        del tokens[:end]
        return {"input_ids": sequences}

    sequences = documents.map(
        cut, batched=True, batch_size=100, remove_columns=documents.column_names
    )
    return sequences.with_format("torch")


def tokenize(texts, tokenizer):
    """Yields the tokens of each text, with the special tokens for its beginning and its end."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if tokenizer("a")["input_ids"][0] != bos:
        bos = None  # only some tokenizers begin each text with this token
    texts = [text or "" for text in texts]  # a value may be missing
    for tokens in tokenizer(texts, add_special_tokens=False)["input_ids"]:
        if not tokens:
            continue
        # A text that has these special tokens already does not get them twice.
        if bos is not None and tokens[0] != bos:
            tokens = [bos, *tokens]
        if eos is not None and tokens[-1] != eos:
            tokens = [*tokens, eos]
        yield tokens


def check_data(args, config, train_data, eval_data, seq_length):
    """Ends the run if it cannot train on these data. Returns what identifies the experiment.

    This dict is saved: a run that is resumed must have the same model and data, whatever their
    names. So it holds the config and a checksum of the tokens."""
    if len(train_data) < args.global_batch_size or len(eval_data) == 0:
        size = f"{len(train_data)} sequences of {seq_length} tokens, {len(eval_data)} held out"
        fail(f"--global-batch-size {args.global_batch_size}: {args.dataset_name} has only {size}")

    crc = len(train_data)
    batches = [data.with_format("numpy").iter(batch_size=1000) for data in (train_data, eval_data)]
    for rows in itertools.chain(*batches):
        for name, tokens in rows.items():
            if tokens.shape[1:] != (seq_length,):
                fail(f"--seq-length {seq_length}: rows of {name} have other lengths")
            is_token = (tokens >= 0) & (tokens < config.vocab_size)
            if name == "labels":
                is_token |= tokens == -100
            if not is_token.all():
                limit = f"the model has those below {config.vocab_size}"
                fail(f"--dataset-name: {name} has the token {tokens[~is_token][0]}, {limit}")
            crc = zlib.crc32(tokens.astype(np.int64), crc)

    config_values = json.loads(config.to_json_string(use_diff=False))
    for name in ("_name_or_path", "transformers_version"):
        config_values.pop(name, None)
    return {
        "seq_length": seq_length,
        "seed": args.seed,
        "global_batch_size": args.global_batch_size,
        "data_crc": crc,
        **{f"config.{name}": value for name, value in config_values.items()},
    }


def load_model(config, weights, attn, seed):
    """The model in fp32 on the CPU, with pretrained weights or, if these are None, random ones."""
    torch.manual_seed(seed)
    attn = None if attn == "auto" else attn  # None: sdpa, if the model has that
    options = {"attn_implementation": attn, "dtype": torch.float32}
    if weights is None:
        return transformers.AutoModelForCausalLM.from_config(config, **options)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        weights, config=config, output_loading_info=True, **options
    )
    if missing := sorted(info["missing_keys"])[:3]:  # those of text and images have other names
        fail(f"--model-name {weights}: it lacks weights for {missing}, see Multimodal in GUIDE.md")
    return model.train()  # from_pretrained returns it in evaluation mode


def send_weights(model, full_weights, device, cpu_offload):
    """Gives all ranks their shards of `full_weights`, a state dict that has values on rank 0 only.

    On the other ranks the model is still on the meta device. `to_empty` gives its tensors storage,
    with arbitrary values, which are replaced by what rank 0 sends."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    model.to_empty(device="cpu" if cpu_offload else device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full_weights, options=options)
    # A state dict lacks some buffers, such as the frequencies of rotary embeddings.
    for name, buffer in buffers.items():
        owner, _, key = name.rpartition(".")
        buffer = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
        dist.broadcast(buffer, src=0)
        setattr(model.get_submodule(owner), key, buffer)


def parse_args():
    """Returns the flags of the command line. @FILE is a file with one --flag=value on each line."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [flags], see --help",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    switch = {"action": "store_true"}
    on_gpu = torch.cuda.is_available()
    can_bf16 = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)  # a V100 cannot
    dtype = "bf16" if can_bf16 else "fp16" if on_gpu else "fp32"

    add = parser.add_argument_group("run").add_argument
    add("-e", "--experiment-name", help="save the run in SAVE_DIR/NAME, and resume it there")
    add("--save-dir", default=str(ROOT / "outputs"), help="folder for all runs")
    add("--seed", type=int, default=0, help="of the order of the data and of random weights")
    add("--device", choices=("cuda", "cpu"), default="cuda" if on_gpu else "cpu", help="to run on")
    add("--dtype", choices=tuple(DTYPES), default=dtype, help="of the computation")
    add("--log-freq", type=int, default=10, help="steps between log lines")
    add("--ckpt-freq", type=int, default=500, help="steps between checkpoints")
    add("--keep-checkpoints", type=int, default=2, help="how many of the newest to keep")
    add("--comet-project-name", default="train-llm", help="where the run is shown")
    add("--comet-workspace", help="None: the one of your account")
    add("--comet-offline", help="an archive to upload later; needs no account", **switch)

    add = parser.add_argument_group("model and data").add_argument
    add("-m", "--model-name", default="tiny", help="tiny, a hub id, or a folder")
    add("--from-scratch", help="take the architecture only, not the weights", **switch)
    add("--attn", default="auto", help="a name that transformers knows, auto: PyTorch's own")
    add("--activation-checkpointing", help="less memory, up to a third more compute", **switch)
    add("--cpu-offload", help="keep shards and optimizer in the memory of the CPU", **switch)
    add("--no-reshard-after-forward", help="gather once a step: faster, more memory", **switch)
    add("--compile", action=argparse.BooleanOptionalAction, default=on_gpu, help="blocks and loss")
    data_help = "python-docs, dummy, a .txt file, a hub id, or what prepare.py has written"
    add("-d", "--dataset-name", default="python-docs", help=data_help)
    add("--dataset-subset", help="the configuration of a dataset on the hub")
    add("--text-column", default="text", help="train on this column of texts")
    length_help = "tokens of a sequence, None: those of prepared rows, 1024, or the model's limit"
    add("-s", "--seq-length", type=int, help=length_help)
    add("-b", "--batch-size", type=int, default=4, help="sequences of a micro-batch")
    add("--global-batch-size", type=int, default=8, help="sequences of an optimizer step")
    add("--eval-freq", type=int, help="steps between evaluations, None: only at the end")
    add("--eval-sequences", type=int, default=256, help="how many to evaluate at most")

    add = parser.add_argument_group("optimization", f"Pretrained: {PRETRAINED}").add_argument
    add("--num-epochs", type=int, help="passes over the training data")
    add("--max-steps", type=int, help="end the run here, if the epochs do not end before")
    add("--lr", type=float, help="learning rate after the warm-up")
    add("--lr-scheduler", choices=("cosine", "linear", "constant"), default="cosine", help="decay")
    add("--lr-cycles", type=int, default=1, help="how many times the rate falls")
    add("--warmup-steps", type=int, help="None: a tenth of the run, at most 100")
    add("--weight-decay", type=float, help="of matrices")
    add("--max-grad-norm", type=float, default=1.0, help="clip gradients to this norm")

    add = parser.add_argument_group("context parallelism").add_argument
    add("--context-size", type=int, default=2, help="processes that share a sequence's tokens")

    given = []
    for word in sys.argv[1:]:
        given += Path(word[1:]).read_text().splitlines() if word.startswith("@") else [word]
    parser.set_defaults(**FROM_SCRATCH)
    args = parser.parse_args(given)
    # Some defaults depend on other flags, so these are read first.
    if args.device == "cpu":
        parser.set_defaults(dtype="fp32", compile=False)
    if args.model_name != "tiny" and not args.from_scratch:
        parser.set_defaults(**PRETRAINED)
    args = parser.parse_args(given)
    if args.model_name == "tiny":
        args.model_name, args.from_scratch = str(TINY), True
    for name, value in vars(args).items():
        may_be_0 = name in ("seed", "warmup_steps", "weight_decay")
        if type(value) in (int, float) and (value < 0 or value == 0 and not may_be_0):
            fail(f"--{name.replace('_', '-')} {value} is too low")
    return args


if __name__ == "__main__":
    main(parse_args())
    dist.barrier()  # rank 0 writes the model, and may still send to Comet
    # A process may abort if it exits while threads of Gloo are still busy, so leave them some time.
    time.sleep(0.2)
    dist.destroy_process_group()

"""Stage 04: replicas of the sharded model (HSDP), and compressed gradients between them.

Try it, train on a text of your own, fine-tune a pretrained model. Without -e nothing is saved.

    torchrun --standalone --nproc-per-node 2 train-llm.py --shard-size 1
    torchrun --standalone --nproc-per-node 2 train-llm.py --shard-size 1 --compression int4
    torchrun --standalone --nproc-per-node 8 train-llm.py --shard-size 4 -m gpt2 -d notes.txt
"""

import argparse
import difflib
import gc
import glob
import json
import math
import os
import re
import shlex
import shutil
import sys
import threading
import time
import zlib
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from pydoc_data.topics import topics  # the language reference that comes with Python: a text

# logs_and_checkpoints_old.py is in the parent folder. The folder goes first on the path, because
# each clone of this repository must import its own copy of the module.
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PARENT = os.getppid()  # the process that has started this one, usually torchrun

# On a CPU, a PyTorch thread that waits for work keeps its core busy for some time before it sleeps.
# By default this time is so long that training becomes many times slower when other programs need
# the cores. This value is a thirtieth of the default on Linux. Set it before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
if __name__ == "__main__" and os.environ.get("RANK", "0") == "0":
    print("importing torch, transformers and datasets: this takes some seconds", flush=True)

import datasets
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from filelock import FileLock
from logs_and_checkpoints_old import (
    MEMORY_METRICS,
    RunLog,
    all_gather_object,
    checkpoints,
    fail,
    load_checkpoint,
    lock_run_dir,
    memory_gb,
    reading,
    save_checkpoint,
    save_final_model,
    say,
    say_last,
)
from safetensors import safe_open
from tokenizers.pre_tokenizers import ByteLevel
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils.checkpoint import checkpoint
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    convert_and_load_state_dict_in_model,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import cached_file
from transformers.utils.chat_template_utils import render_jinja_template

transformers.logging.set_verbosity_error()  # hides warnings
# In each forward pass transformers checks whether a row holds several sequences, and Python waits
# until the GPU has the answer. Here the answer is always no, and None says so.
transformers.masking_utils.find_packed_sequence_indices = lambda position_ids: None

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Data types in which compressed gradients are sent, see `encode`. Integers: their largest value.
WIRE_FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
WIRE_INTEGERS = {"int8": 127, "int4": 7}
ROW_LENGTH = 256  # values with a common scale
# A collective whose name differs between versions of PyTorch.
all_gather_into_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# A resumed run must have the same values for these flags. All other flags may change, and so may
# the hardware and the stage (the numbered scripts of this course are called stages).
EXPERIMENT_FLAGS = (
    "model_name",
    "from_scratch",
    "dataset_name",
    "dataset_subset",
    "text_column",
    "train_on_prompt",
    "seq_length",
    "seed",
    "global_batch_size",
)
# The values of these may differ if they stand for the same model and data, see `check_contents`.
CONTENT_FLAGS = (
    "model_name",
    "dataset_name",
    "dataset_subset",
    "text_column",
    "train_on_prompt",
)
# Peak FLOP/s (dense, bf16) by a part of the device's name, from NVIDIA's data sheets. The first
# that matches counts.
PEAK_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GB200": 2500e12,
    "B200": 2250e12,
}


@record  # torchrun shows the traceback of the process that failed first
def main(args):
    run_dir = open_run_dir(args)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = DTYPES[args.dtype]

    # torchrun starts this script several times, usually once for each GPU, and every process runs
    # all of it. The processes form a process group, in which each has a number, its rank, from 0 to
    # world_size - 1. They communicate through collectives: operations that every rank must call,
    # such as all_reduce, which gives every rank the sum of a tensor over all ranks. NCCL, a library
    # of NVIDIA's, carries them out for tensors on GPUs, and Gloo for tensors on the CPU.
    if device.type == "cuda":
        # The local rank is the number of a process on its machine. Each takes a GPU of its own.
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    # A barrier is a collective that returns when every rank has called it. A collective fails when
    # it waits for longer than its timeout, but loading data or a model may take hours. So the
    # barriers for loading use a process group with a long timeout.
    loading_group = dist.new_group(backend="gloo", timeout=timedelta(hours=12))

    # Data: sequences of one length, cut from the documents.
    with reading(f"--model-name {args.model_name}"):
        config, tokenizer, weights = load_config(args.model_name, args.from_scratch)
        args.seq_length = check_seq_length(args.seq_length, config, args.model_name)
    # The ranks of a machine take turns: the first one tokenizes, and the others read the result
    # from the cache.
    lock = FileLock(f"/tmp/train-llm-{os.getuid()}-{os.getppid()}.lock")
    tokenizes = int(os.environ["LOCAL_RANK"]) == 0
    if tokenizes:
        lock.acquire()
    dist.barrier(loading_group)  # from here on, the first rank of each machine has its lock
    if not tokenizes:
        lock.acquire()
    with reading(f"--dataset-name {args.dataset_name}"):
        train_data, eval_data = load_data(args, tokenizer)
    lock.release()
    dist.barrier(loading_group)
    Path(lock.lock_file).unlink(missing_ok=True)

    # Look at every token once. A wrong one would otherwise be found in the middle of the run, or
    # not at all. Checksums are saved: when the run is resumed, a name may stand for other files.
    with reading(f"--dataset-name {args.dataset_name}"):
        contents = contents_of(args, config, tokenizer, train_data, eval_data)
    check_contents(args, contents)
    dist.barrier(loading_group)  # looking at all tokens may take a long time, too
    check_same_on_all_ranks(args, contents)
    eval_data = eval_data.select(range(min(len(eval_data), args.eval_sequences)))

    # An optimizer step trains on one global batch. An epoch is one pass over the training data. The
    # sequences left over at its end, fewer than a batch, are skipped.
    steps_per_epoch = len(train_data) // args.global_batch_size
    data_size = (
        f"{len(train_data)} sequences of {args.seq_length} tokens and {len(eval_data)} held out"
    )
    if steps_per_epoch == 0 or len(eval_data) == 0:
        name = args.dataset_name
        fail(f"--global-batch-size {args.global_batch_size}: {name} has only {data_size}")
    total_steps = args.num_epochs * steps_per_epoch
    if args.max_steps:
        total_steps = min(total_steps, args.max_steps)
    say(f"{args.dataset_name}: {data_size}, {total_steps} steps")

    # A global batch is usually too large for the memory of the device. So it is split into
    # micro-batches, whose gradients are added up before the update (gradient accumulation).
    # Each rank takes an equal share of the global batch. So the number of ranks does not change
    # what a step trains on.
    sequences_per_rank = math.ceil(args.global_batch_size / world_size)
    grad_accum_steps = math.ceil(sequences_per_rank / args.batch_size)
    say(
        f"{args.global_batch_size} sequences per step = "
        f"{world_size} rank(s) × "
        f"{grad_accum_steps} micro-batch(es) of at most {args.batch_size}"
    )

    # Model. Its parameters are fp32 whatever the dtype: with the 8 bits of precision that bf16 has,
    # most updates would be rounded away.
    # The model may be too large for one GPU. So every rank builds it on the meta device, where
    # tensors have a shape but no storage. Below, it is sharded, and its shards get their values.
    model_flags = f"--model-name {args.model_name} --attn {args.attn}"
    shard_size = args.shard_size or int(os.environ["LOCAL_WORLD_SIZE"])
    with reading(model_flags):
        state_device = torch.device("cpu") if args.cpu_offload else device
        check_memory(config, args.attn, shard_size, state_device)
        with torch.device("meta"):
            model = load_model(config, None, args.attn, args.seed)
        files, conversions = find_weights(model, weights)  # before `fully_shard` changes classes
    run_info = {
        "parameters": model.num_parameters(),
        "attn": model.config._attn_implementation,
        "flops_per_token": flops_per_token(model, args.seq_length),
        "device_name": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
    }
    run_info["peak_flops"] = peak_flops(run_info["device_name"])
    say(f"{run_info['parameters']:,} parameters, {run_info['attn']}, {args.dtype}, {device}")

    # The transformer blocks. `_no_split_modules` has the name of their class, for each architecture
    # in transformers.
    blocks = [m for m in model.modules() if type(m).__name__ in model._no_split_modules]

    # torch.compile compiles the first block and uses the result for the others: their code is the
    # same. Compiling the whole model would take many times as long. The loss is compiled too: its
    # intermediate results are the largest tensors of a step, and compiled code never stores them.
    # With `dynamic=False` each batch size has its own code. Otherwise a smaller micro-batch would
    # replace the code for the full ones with slower code for all sizes.
    cross_entropy = sum_cross_entropy
    is_compiled = device.type == "cuda" if args.compile is None else args.compile
    if is_compiled:
        for block in blocks:
            block.forward = torch.compile(block.forward, dynamic=False)
        cross_entropy = torch.compile(sum_cross_entropy, dynamic=False)

    # Activation checkpointing keeps only the input of each block. In the backward pass it computes
    # the other activations a second time. No block draws random numbers, as dropout is 0, so the
    # state of the random number generator need not be kept for that.
    if args.activation_checkpointing:
        options = {"use_reentrant": False, "preserve_rng_state": False}
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, **options)

    # Mixed precision: parameters are gathered in `dtype`, so the whole forward pass runs in it, and
    # gradients are averaged in fp32. `loss_sum` computes the loss in fp32, as before.
    mixed_precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy() if args.cpu_offload else OffloadPolicy()

    # Hybrid sharding (HSDP): the ranks form a two-dimensional mesh. The ranks of a row together
    # hold one replica of the model, a shard each. The ranks of a column hold the same shard. FSDP
    # gathers parameters within a row, where links are fast. Between rows, only gradients are sent.
    num_replicas = world_size // shard_size
    mesh = init_device_mesh(
        device.type, (num_replicas, shard_size), mesh_dim_names=("replicate", "shard")
    )
    shard_mesh, replicate_group = mesh["shard"], mesh.get_group("replicate")
    compression = args.compression if num_replicas > 1 else "none"
    say(f"{num_replicas} replica(s) of {shard_size} shard(s), compression {compression}")
    if num_replicas == 1 and args.compression != "none":
        say("nothing to compress: --shard-size 1 makes each process a replica")

    # Sharding: each rank keeps 1 / shard_size of every parameter, its shard. FSDP gathers the
    # parameters of a block from the ranks of its row before its forward pass, frees them after it,
    # and gathers them again for its backward pass. So besides its shards a GPU holds the parameters
    # of a few blocks at a time. What is not in a block, the embeddings and the last norm, is
    # sharded with the root module.
    for module in [*blocks, model]:
        fully_shard(module, mesh=shard_mesh, mp_policy=mixed_precision, offload_policy=offload)
    if args.no_reshard_after_forward:
        model.set_reshard_after_forward(False)

    # Now the shards get their values. Each rank reads its own from the files of a pretrained model.
    # Random weights must be the same for any number of ranks. So rank 0 alone builds the model, in
    # CPU memory, and sends it to all. The barrier is there because either may take a long time.
    shard_device = torch.device("cpu") if args.cpu_offload else device
    full_model = None
    with reading(model_flags):
        if files:
            read_shards(model, weights, files, conversions, shard_device)
        elif dist.get_rank() == 0:
            full_model = load_model(config, weights, args.attn, args.seed)
    dist.barrier(loading_group)
    if not files:
        fill_from_rank_0(model, full_model, shard_device)
    del full_model
    fill_buffers(model, device)
    with reading(model_flags):
        check_causal(model, args.seq_length, device)

    # Optimizer. Matrices, embeddings among them, have weight decay. Biases and norm weights do not.
    # `fused` updates all parameters in a few kernels instead of several for each parameter.
    args.lr = args.lr or (2e-5 if weights else 1e-3)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, args.lr, fused=True)

    # Learning rate. The scheduler has a function from the step to a factor. We call that function
    # ourselves, so that a resumed run needs to know the step only, and no state of the scheduler.
    warmup_steps = args.warmup_steps
    if warmup_steps is None:
        warmup_steps = min(100, total_steps // 10)
    scheduler = transformers.get_scheduler(args.lr_scheduler, optimizer, warmup_steps, total_steps)
    lr_factor = scheduler.lr_lambdas[0]

    # fp16 cannot represent small gradients. The scaler multiplies the loss by a large number before
    # the backward pass, and divides the gradients by it afterwards. It does nothing for bf16 and
    # fp32.
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "fp16")

    # Resume from the newest checkpoint of this run, if there is one. A run that was killed after
    # its last step and before the export skips the loop below.
    resumed = load_checkpoint(run_dir, model, optimizer) if run_dir else {"step": 0}
    last_step = resumed["step"]
    if last_step >= total_steps and (run_dir / "final_model" / f"step-{last_step:08d}").exists():
        say(
            f"{run_dir} is finished at step {last_step}: raise --max-steps or --num-epochs, or "
            "choose another name (-e)"
        )
        say_what_is_left(run_dir)
        return
    if resumed.get("total_steps", total_steps) != total_steps:
        before = resumed["total_steps"]
        say(f"learning rate: scheduled over {total_steps} steps, previously {before}")
    if resumed.get("scaler"):
        scaler.load_state_dict(resumed["scaler"])
    # For the log: values that the flags leave open.
    run_info["device"] = str(device)
    run_info["compile"] = is_compiled
    run_info["max_steps"] = total_steps
    run_info["warmup_steps"] = warmup_steps
    run_info["shard_size"] = shard_size
    run_info["compression"] = compression
    log = RunLog(run_dir, last_step, total_steps, resumed.get("comet_key"), vars(args), run_info)

    # FSDP averages the gradients over the ranks of a row. When it has done so for a module, it
    # calls the hook of that module, and ours averages over the replicas. (On a two-dimensional mesh
    # FSDP would do that itself, uncompressed.) On a GPU the hook runs in a stream of its own, in
    # parallel with the backward pass.
    compressor = GradientCompressor(
        replicate_group,
        compression,
        args.keep_ratio,
        args.chunk,
        args.wire_dtype,
        is_compiled,
        args.cpu_offload,
        log.lap,
    )
    for module in [*blocks, model]:  # a hook on the root alone would miss the blocks
        module.set_all_reduce_hook(partial(compressor, module))

    for step in range(last_step + 1, total_steps + 1):
        # Data. The seed and the epoch alone decide the order of an epoch's sequences, and the step
        # decides which of them form its global batch. So a resumed run continues exactly where it
        # was, without any state of a data loader.
        epoch, step_in_epoch = divmod(step - 1, steps_per_epoch)
        if step_in_epoch == 0 or step == last_step + 1:
            order = np.random.default_rng((args.seed, epoch)).permutation(len(train_data))
        first = step_in_epoch * args.global_batch_size
        indices = order[first : first + args.global_batch_size]

        micro_batches, num_targets = make_micro_batches(
            train_data, indices, args.batch_size, device
        )
        dist.all_reduce(num_targets)  # a CPU tensor, so Gloo: each rank now has the sum of all
        num_targets.clamp_(min=1)  # a batch without any target has loss 0, not 0 / 0
        compressor.start_step(step, device)
        log.lap("data")

        # Forward and backward. The gradients of all micro-batches add up in `.grad`.
        optimizer.zero_grad()
        step_loss = torch.zeros((), device=device)
        for i, (input_ids, targets) in enumerate(micro_batches):
            # It is enough to average the gradients once per step, in the backward pass of the last
            # micro-batch.
            is_last = i == len(micro_batches) - 1
            # But until then each rank would have to keep the gradients of the whole model. So every
            # backward pass averages, and a rank keeps the gradients of its shards. Only with
            # --no-reshard-after-forward does it keep all, and the gathered parameters as well.
            if args.no_reshard_after_forward:
                model.set_requires_gradient_sync(is_last)
                model.set_reshard_after_backward(is_last)
            # Replicas average once per step. Until then the compressor keeps the sum of a shard's
            # gradients, so they must not add up in `.grad` as well.
            compressor.is_last = is_last
            optimizer.zero_grad()

            loss = loss_sum(model, input_ids, targets, cross_entropy)
            step_loss += loss.detach()
            log.lap("forward")

            # Divide by the number of targets in the whole global batch, not in the micro-batch.
            # Then every target has the same weight, even if some micro-batches have fewer of them,
            # and the result does not depend on --batch-size.
            # `num_targets` counts the targets of all ranks, so the gradients of the ranks must be
            # added up. They are averaged instead, so multiply by world_size to get the sum.
            scaler.scale(loss * world_size / num_targets).backward()
            log.lap("backward")

        # Update. The gradients are clipped to a norm of at most max_grad_norm, so that one unusual
        # batch cannot cause a very large update.
        scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        lr = args.lr * lr_factor(step - 1)
        for group in optimizer.param_groups:
            group["lr"] = lr
        scaler.step(optimizer)
        scaler.update()
        log.lap("update")

        # Log. Reading a value (.item(), .tolist()) waits until the GPU has computed it, so this is
        # done only in the steps that are logged.
        metrics = {}
        if step == 1 or step % args.log_freq == 0 or step == total_steps:
            dist.all_reduce(step_loss)
            memory = memory_gb(model, optimizer, device)
            dist.all_reduce(memory, dist.ReduceOp.MAX)  # of the rank that uses most
            grad_norm = grad_norm.full_tensor()  # a DTensor: this combines the norms of all shards
            times = log.pop_times()
            encode_ms = times.pop("time/encode_ms", 0.0)
            communicate_ms = times.pop("time/communicate_ms", 0.0)
            times["time/backward_ms"] += encode_ms + communicate_ms  # it is when the hook runs
            metrics = {
                "train/loss": step_loss.item() / num_targets.item(),
                "train/grad_norm": grad_norm.item(),
                "train/learning_rate": lr,
                "train/epoch": step / steps_per_epoch,
                "comm/bytes_per_step": compressor.bytes_sent,
                "comm/compression_ratio": compressor.ratio(),
                "comm/encode_ms": encode_ms,
                **times,
                **dict(zip(MEMORY_METRICS, memory.tolist(), strict=True)),
            }

        # Evaluate on text that the model was not trained on.
        if step == total_steps or (args.eval_freq and step % args.eval_freq == 0):
            metrics.update(evaluate(model, eval_data, args.batch_size, device))
            log.lap("outside")  # what is outside of a step does not count for tokens per second
        log.step(step, metrics)
        log.lap("log")

        # Checkpoint: model and optimizer, and what else is needed to resume.
        if run_dir and (step == total_steps or step % args.ckpt_freq == 0):
            values = {
                "flags": vars(args),
                "experiment": experiment(args),
                "contents": contents,
                "total_steps": total_steps,
                "comet_key": log.comet_key,
                "scaler": scaler.state_dict(),
            }
            times = save_checkpoint(run_dir, step, model, optimizer, values, args.keep_checkpoints)
            log.after_checkpoint(times)
            log.lap("outside")

    # Export the model for `from_pretrained`. Then show what it writes after a prompt that was held
    # out from training.
    if run_dir:
        export_dtype = DTYPES[args.export_dtype]
        last_step = max(last_step, total_steps)
        save_final_model(run_dir, last_step, model, config, tokenizer, export_dtype)
    # Sampling a token gathers the whole model, so the sample is shorter than in earlier stages.
    tokens, start = choose_prompt(eval_data[-1], 64)
    tokens = sample(model, tokens, start, device)
    log.sample(tokenizer.decode(tokens[:start]), tokenizer.decode(tokens[start:]))
    log.close()
    say_what_is_left(run_dir)


def load_config(name, from_scratch):
    """Returns the model's config, its tokenizer, and the path or hub id of its weights.

    The path is None if the model starts from random weights."""
    if name == "tiny":
        config = transformers.LlamaConfig(
            vocab_size=384,  # 257 tokens, rounded up to a multiple of 128
            hidden_size=128,
            intermediate_size=320,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=256,
            bos_token_id=0,
            eos_token_id=0,
        )
        return config, byte_tokenizer(), None

    # A local folder may hold a config alone: then bytes are the tokens, and the weights are random.
    files = [file.name for file in Path(name).glob("*")]  # empty if `name` is a hub id
    has_tokenizer = not files or any("token" in file or "vocab" in file for file in files)
    endings = (".safetensors", ".bin", ".pt")
    has_weights = not files or any(ending in file for file in files for ending in endings)
    options = {"trust_remote_code": False}
    config = transformers.AutoConfig.from_pretrained(name, return_dict=True, **options)
    config = config.get_text_config()  # the language part of a multimodal model
    if has_tokenizer:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **options)
    else:
        tokenizer = byte_tokenizer()
        say(f"{name} has no tokenizer: its tokens are bytes here")
    num_tokens = 1 + max(tokenizer.get_vocab().values())
    if num_tokens > config.vocab_size:
        fail(f"--model-name {name}: {num_tokens} tokens, a vocabulary of {config.vocab_size}")

    disable_dropout(config, name)
    return config, tokenizer, name if has_weights and not from_scratch else None


def disable_dropout(config, name):
    """Sets dropout and the like to 0: random numbers would depend on how a batch is split."""
    for key, value in vars(config).items():
        if value and any(part in key for part in ("dropout", "pdrop", "layerdrop", "jitter")):
            setattr(config, key, 0.0)
            say(f"{key} is {value} in {name} and 0 here")


def byte_tokenizer():
    """A tokenizer that needs no file: 256 bytes and an end-of-text token, which has number 0."""
    tokens = ["<|endoftext|>", *sorted(ByteLevel.alphabet())]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return transformers.GPT2Tokenizer(vocabulary, merges=[])


def check_seq_length(seq_length, config, name):
    """The sequence length: the one asked for, or the longest that the model takes, up to 1024."""
    longest = getattr(config, "max_position_embeddings", sys.maxsize)
    seq_length = seq_length or min(1024, longest)
    if not 2 <= seq_length <= longest:
        fail(f"--seq-length {seq_length}: {name} takes from 2 to {longest} tokens")
    return seq_length


def load_data(args, tokenizer):
    """Returns the sequences to train on and those to evaluate on.

    These are a split called validation or test, or else the last 5% of the training data."""
    splits = load_splits(args.dataset_name, args.dataset_subset, tokenizer, args.seq_length)
    documents = find_split(splits, "train")
    if documents is None:
        raise ValueError(f"no split is called train, there are {list(splits)}")
    columns = choose_columns(documents, tokenizer, args.text_column, args.train_on_prompt)
    train = pack(documents, columns, tokenizer, args)
    if len(train) == 0 and columns in INSTRUCTION_COLUMNS:
        raise ValueError("no row has an answer (of messages: one with the role assistant)")
    for name in ("validation", "test"):
        documents = find_split(splits, name)
        if documents is not None:
            missing = set(columns) - set(documents.column_names)
            if missing:
                raise ValueError(f"the split {name} has no column {', '.join(missing)}")
            return train, pack(documents, columns, tokenizer, args)
    num_held_out = math.ceil(len(train) / 20)
    num_train = len(train) - num_held_out
    return train.select(range(num_train)), train.select(range(num_train, len(train)))


def load_splits(name, subset, tokenizer, seq_length):
    """Returns the splits of a data set by name: of documents, or of rows that hold tokens."""
    if name == "python-docs":
        datasets.disable_progress_bars()  # this takes only a second
        return {"train": datasets.Dataset.from_dict({"text": list(topics.values())})}
    if name == "dummy":
        tokens = np.random.default_rng(0).integers(len(tokenizer), size=(4096, seq_length))
        return {"train": datasets.Dataset.from_dict({"input_ids": tokens})}

    source = source_of(name, subset)
    if Path(name).exists() or ending_of(Path(name)) in FILE_FORMATS:
        # `datasets` caches what it has read, and recognizes a file by its path and modification
        # time. A file may change and keep both, so each content has a cache of its own.
        folder = f"{checksum_of_files(source):08x}"
        source["cache_dir"] = str(Path(datasets.config.HF_DATASETS_CACHE, folder))
    return datasets.load_dataset(**source)


# What `datasets` calls the formats of files, by their endings. Each may be followed by .gz.
FILE_FORMATS = {
    ".txt": "text",
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}


def source_of(name, subset):
    """The arguments of `load_dataset` for a hub id, a file, or a folder of files."""
    path = Path(name)
    ending = ending_of(path)
    source = {"path": name, "name": subset}
    if ending in FILE_FORMATS:
        # A name with * stands for several files, unless there is a file with this very name.
        if path.is_file():
            name = glob.escape(name)
        elif not any(path.parent.glob(path.name)):
            raise FileNotFoundError(f"there is no such file in {path.resolve().parent}")
        source = {"path": FILE_FORMATS[ending], "data_files": name}
    elif path.is_file():
        raise ValueError(f"it must end in {', '.join(FILE_FORMATS)}, or one of these and .gz")
    endings = {ending_of(file) for file in path.rglob("*")}  # of the files in a folder
    if ending == ".txt" or endings & FILE_FORMATS.keys() == {".txt"}:
        source["sample_by"] = "document"  # a file is a document, not each of its lines
    return source


def checksum_of_files(source):
    """CRC-32 of the files of a data set. `source` has the arguments of `load_dataset`.

    Files may be large: of a file above 1 MiB, only the length and 16 parts of 64 KiB are used."""
    checksum = 0
    splits = datasets.load_dataset_builder(**source).config.data_files or {}
    for files in splits.values():
        for path in files:
            with open(path, "rb") as file:
                length = file.seek(0, os.SEEK_END)
                for start in np.linspace(0, max(0, length - 2**16), 16, dtype=int):
                    file.seek(start)
                    checksum = zlib.crc32(file.read(2**16), checksum)
            checksum = zlib.crc32(str(length).encode(), checksum)
    return checksum


def ending_of(path):
    """The ending of a file's name, such as .txt, without a .gz after it."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def find_split(splits, name):
    """The split of this name, None if there is none. Chats often have train_sft and test_sft."""
    return splits.get(name, splits.get(f"{name}_sft"))


# The columns of instruction data, in the formats of chats, of TRL and of Alpaca.
INSTRUCTION_COLUMNS = (
    ("messages",),
    ("prompt", "completion"),
    ("instruction", "input", "output"),
    ("instruction", "output"),
)
# A chat template is a program that turns the messages of a conversation into a text. This one is
# for tokenizers that have none: headings as in Alpaca, the end-of-text token after each answer.
CHAT_TEMPLATE = """
{%- for message in messages -%}
{{ "" if loop.first else "\\n\\n" }}
{%- if message.role == "assistant" -%}
{{ "### Response:\\n" }}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
{%- else -%}
{{ "### Instruction:" if message.role == "user" else "### " + message.role.capitalize() + ":" }}
{{ message.content }}
{%- endif -%}
{%- endfor -%}
{{ "\\n\\n### Response:\\n" if add_generation_prompt else "" }}"""


def choose_columns(documents, tokenizer, text_column, train_on_prompt):
    """Returns the names of the columns to train on, and prints them. They tell what the rows hold.

    A tuple: a column of text, or one of `INSTRUCTION_COLUMNS`, or ("input_ids",)."""
    names = documents.column_names
    texts = []
    conversations = []  # columns that hold lists of messages
    for name, feature in documents.features.items():
        if getattr(feature, "dtype", "").endswith("string"):
            texts.append(name)
        elif isinstance(getattr(feature, "feature", None), dict):
            conversations.append(name)

    if text_column is not None:
        if text_column not in texts:
            columns = ", ".join(texts) or "none"
            fail(f"--text-column {text_column}: the columns of text are {columns}")
        say(f"training on column {text_column!r}")
        return (text_column,)

    if "input_ids" in names:
        return ("input_ids",)

    for columns in INSTRUCTION_COLUMNS:
        if set(columns) <= set(names):
            trained_on = "prompts and answers" if train_on_prompt else "the answers"
            say(f"training on {trained_on} in the columns {', '.join(columns)}")
            if "text" in texts:
                say("column 'text' holds prompts with answers (to use it: --text-column text)")
            # A prompt and a completion that are strings are joined, without a template.
            needs_template = columns[0] != "prompt" or "prompt" not in texts
            if needs_template and tokenizer.chat_template is None:
                set_chat_template(tokenizer)
            return columns

    if "text" in texts:
        texts = ["text"]
    elif conversations:
        raise ValueError(
            f"{', '.join(conversations)}: conversations must be in a column called messages, with "
            "role and content"
        )
    if not texts:
        raise ValueError(f"no column holds text, there are {', '.join(names)}")
    if len(texts) > 1:
        raise ValueError(
            f"several columns hold text: choose one of {', '.join(texts)} with --text-column, or "
            "call them prompt and completion"
        )
    say(f"training on column {texts[0]!r}")
    return tuple(texts)


def set_chat_template(tokenizer):
    """Gives a tokenizer our chat template, which is then exported with the model."""
    say("no chat template: '### Instruction:' and '### Response:' are the headings")
    tokenizer.chat_template = CHAT_TEMPLATE
    # Some tokenizers begin each text with a special token. A conversation must begin with it, too.
    if tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id:
        tokenizer.chat_template = "{{ bos_token }}" + CHAT_TEMPLATE


def pack(documents, columns, tokenizer, args):
    """Turns documents into sequences of `args.seq_length` tokens, a data set with `input_ids`.

    It also has `labels` if they are not the same. Rows that hold tokens are taken as they are."""
    if columns == ("input_ids",):
        check_labels(documents)
        sequences = documents
    else:
        packer = Packer(columns, tokenizer, args.seq_length, args.train_on_prompt)
        old_columns = documents.column_names
        sequences = documents.map(packer, batched=True, remove_columns=old_columns)
    columns = [name for name in ("input_ids", "labels") if name in sequences.column_names]
    return sequences.with_format("torch", columns=columns)


def check_labels(documents):
    """Raises ValueError if padding or labels follow another program's convention, not the one here.

    It looks at the first 1000 rows."""
    rows = documents.with_format("numpy")[:1000]
    if "labels" not in rows:
        if "attention_mask" in rows and np.any(np.equal(rows["attention_mask"], 0)):
            raise ValueError("attention_mask has zeros, for padding: give labels, with -100 there")
        return
    input_ids, labels = rows["input_ids"], rows["labels"]
    if not input_ids.ndim == labels.ndim == 2 or input_ids.shape != labels.shape:
        return  # `checksum_of_tokens` says what is wrong
    is_target = labels != -100
    if not is_target.any():
        raise ValueError("labels has no target in the first 1000 rows, all are -100")
    is_same = (labels == input_ids) | ~is_target
    is_next = (labels[:, :-1] == input_ids[:, 1:]) | ~is_target[:, :-1]
    if is_next.all() and not is_same.all():
        raise ValueError("labels are shifted by one: they must be as input_ids, or -100")


class Packer:
    """Joins the tokens of documents and cuts them into sequences of one length (packing).

    `Dataset.map` calls it with batch after batch of documents. The tokens that do not fill a
    sequence wait in `leftover` for the next batch. Labels are joined and cut in the same way."""

    def __init__(self, columns, tokenizer, seq_length, train_on_prompt):
        self.columns = columns
        self.tokenizer = tokenizer
        self.seq_length = seq_length
        self.train_on_prompt = train_on_prompt
        self.leftover = {}

    def __call__(self, rows):
        sequences = {}
        tokenized = tokenize(rows, self.columns, self.tokenizer, self.train_on_prompt)
        for name, documents in tokenized.items():
            tokens = self.leftover.get(name, [])
            for document in documents:
                tokens += document
            end = len(tokens) - len(tokens) % self.seq_length
            self.leftover[name] = tokens[end:]
            starts = range(0, end, self.seq_length)
            sequences[name] = [tokens[i : i + self.seq_length] for i in starts]
        return sequences


def tokenize(rows, columns, tokenizer, train_on_prompt):
    """Token ids of documents. `rows` is a dict that has a list of values for each column.

    Returns {"input_ids": lists of int}, with the end-of-text token after each text. For instruction
    data there are also "labels": -100 for tokens that are not part of an answer, so that they have
    no loss."""
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if columns not in INSTRUCTION_COLUMNS:
        documents = tokenizer([text or "" for text in rows[columns[0]]])["input_ids"]
        # Some tokenizers add the token themselves.
        return {"input_ids": [ids if ids[-1:] == eos else ids + eos for ids in documents]}

    tokens = {"input_ids": [], "labels": []}
    for values in zip(*[rows[name] for name in columns], strict=True):
        row = dict(zip(columns, values, strict=True))
        try:
            examples = list(tokenize_instruction(row, tokenizer, eos))
        except Exception as error:  # chat templates raise errors of any type
            raise ValueError(f"a row cannot be read: {error!r}: {row!r:.200}") from None
        for ids, is_answer in examples:
            labels = ids
            if not train_on_prompt:
                labels = np.where(is_answer, ids, -100).tolist()
            tokens["input_ids"].append(ids)
            tokens["labels"].append(labels)
    return tokens


def tokenize_instruction(row, tokenizer, eos):
    """Yields the token ids of a row, and for each token whether it is part of an answer."""
    given = []
    if "messages" in row:
        messages = clean_messages(row["messages"])
    elif "instruction" in row:
        request = "\n\n".join(filter(None, [row["instruction"], row.get("input")]))
        answer = {"role": "assistant", "content": row["output"]}
        messages = clean_messages([{"role": "user", "content": request}, answer])
    elif isinstance(row["completion"], list):
        given = clean_messages(row["prompt"])
        messages = given + clean_messages(row["completion"])
    elif row["completion"] is None:
        return
    else:
        # Two strings are joined as they are.
        text = row["prompt"] + row["completion"]
        answers = [(len(row["prompt"]), len(text))]
        ids, is_answer = tokenize_answers(text, answers, tokenizer)
        if ids[-1:] == eos:
            ids, is_answer = ids[:-1], is_answer[:-1]
        yield ids + eos, is_answer + [True] * len(eos)
        return
    yield from tokenize_conversation(messages, len(given), tokenizer)


def clean_messages(messages):
    """Messages as chat templates want them: no missing values, and one text as the content.

    `datasets` gives each message all keys that any message has, with None for those it lacks."""
    cleaned = []
    for message in messages or []:
        message = {key: value for key, value in message.items() if value is not None}
        if isinstance(message.get("content"), list):
            message["content"] = "".join(part["text"] for part in message["content"])
        if message.keys() - {"role"}:  # otherwise it says nothing
            cleaned.append(message)
    return cleaned


def tokenize_conversation(messages, num_given, tokenizer):
    """Yields the token ids of a conversation, and for each token whether it is part of an answer.

    The answers are what the assistant says, but not in the first `num_given` messages."""
    render = partial(tokenizer.apply_chat_template, tokenize=False)
    template = tokenizer.get_chat_template()
    if re.search(r"\{%-?\s*generation\b", template):
        # The template marks what the assistant has to write.
        [text], [answers] = render_jinja_template(
            [messages],
            chat_template=template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
        end_of_given = len(render(messages[:num_given])) if num_given > 0 else 0
        answers = [(start, end) for start, end in answers if start >= end_of_given]
        if answers:
            yield tokenize_answers(text, answers, tokenizer, add_special_tokens=False)
        return

    # Otherwise an answer is what the template adds when the answer is added to the messages. Some
    # templates write an answer differently when a question follows it, for example without the
    # reasoning. Then the messages up to each answer are an example of their own.
    text, answers = "", []
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and i >= max(1, num_given):
            prompt = render(messages[:i], add_generation_prompt=True)
            longer_text = render(messages[: i + 1])
            if not longer_text.startswith(text):
                yield tokenize_answers(text, answers, tokenizer, add_special_tokens=False)
                answers = []
            text = longer_text
            # The prompt may end in what this answer does not have, such as <think>.
            start = len(os.path.commonprefix([prompt, text]))
            answers.append((start, len(text)))
    if answers:
        yield tokenize_answers(text, answers, tokenizer, add_special_tokens=False)


def tokenize_answers(text, answers, tokenizer, **options):
    """Token ids of a text, and for each whether it is in one of `answers`, ranges of characters."""
    tokens = tokenizer(text, return_offsets_mapping=True, **options)
    ends = np.array([end for _, end in tokens["offset_mapping"]])  # of each token, in the text
    is_answer = np.zeros(len(ends), bool)
    for start, end in answers:
        is_answer |= (start < ends) & (ends <= end)
    return tokens["input_ids"], is_answer.tolist()


def contents_of(args, config, tokenizer, train_data, eval_data):
    """Identifies model and data by their content, not by name: a dict for the checkpoint."""
    # What does not change the training is left out, such as versions and paths.
    left_out = ("transformers_version", "_name_or_path", "architectures", "dtype", "use_cache")
    left_out += ("id2label", "label2id", "problem_type", "return_dict", "output_attentions")
    left_out += ("output_hidden_states", "chunk_size_feed_forward", "pretraining_tp")
    config_values = json.loads(config.to_json_string(use_diff=False))
    vocabulary = [sorted(tokenizer.get_vocab().items()), tokenizer.eos_token_id]
    return {
        "config": {k: v for k, v in config_values.items() if k not in left_out},
        "tokenizer": zlib.crc32(json.dumps(vocabulary).encode()),
        "training data": checksum_of_tokens(train_data, args.seq_length, config.vocab_size),
        "evaluation data": checksum_of_tokens(eval_data, args.seq_length, config.vocab_size),
    }


def checksum_of_tokens(data, seq_length, vocab_size):
    """Returns a CRC-32 checksum of all tokens and labels. Raises ValueError if one is wrong.

    A thousand rows at a time, as Arrow stores them: with lists of Python it takes much longer."""
    checksum = 0
    data = data.with_format("arrow", columns=data.format["columns"])
    for number, table in enumerate(data.iter(batch_size=1000)):
        for name in table.column_names:
            column = table[name].combine_chunks()
            token_type = getattr(column.type, "value_type", None)  # None: these are no lists
            is_right = token_type is not None and pa.types.is_integer(token_type)
            if is_right:
                # A row that is null has the length NaN, and a token that is null has the value NaN.
                lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
                tokens = column.flatten().to_numpy(zero_copy_only=False)
                is_token = (tokens >= 0) & (tokens < vocab_size)
                if name == "labels":
                    is_token |= tokens == -100
                is_right = (lengths == seq_length).all() and is_token.all()
            if not is_right:
                find_mistake(name, column.to_pylist(), 1000 * number, seq_length, vocab_size)
            checksum = zlib.crc32(np.ascontiguousarray(tokens, dtype=np.int64), checksum)
    return checksum


def find_mistake(name, rows, first_row, seq_length, vocab_size):
    """Raises ValueError for the first of the rows that is wrong, see `checksum_of_tokens`."""
    for number, tokens in enumerate(rows, first_row):
        if not isinstance(tokens, list):
            raise ValueError(f"row {number} of {name} is not a list of tokens: {tokens!r:.50}")
        if len(tokens) != seq_length:
            counts = f"{len(tokens)} tokens, --seq-length is {seq_length}"
            raise ValueError(f"row {number} of {name} has {counts}")
        for token in tokens:
            is_label = name == "labels" and token == -100
            if type(token) is not int or not (is_label or 0 <= token < vocab_size):
                tokens_of_model = f"the model has tokens from 0 to {vocab_size - 1}"
                raise ValueError(f"row {number} of {name} has {token!r:.50}, {tokens_of_model}")


def check_memory(config, attn, num_shards, device):
    """Ends the run if a model is too large to be trained here, before it is built.

    Its state takes 16 bytes for each parameter: the parameter, its gradient and the two moments of
    Adam, 4 bytes each. A process keeps 1 / num_shards of it. Activations come on top."""
    with torch.device("meta"):  # a model without values, to count the parameters
        model = load_model(config, None, attn, 0)
    needed = 16 * model.num_parameters() / num_shards
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = psutil.virtual_memory().total / int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if needed > memory:
        sizes = f"{needed / 1e9:,.0f} GB with gradients and optimizer, a process has"
        advice = "split them over more processes (03-fsdp)"
        name = config.name_or_path or "tiny"
        fail(
            f"--model-name {name}: {model.num_parameters():,} parameters take {sizes} "
            f"{memory / 1e9:,.0f} GB; {advice}"
        )


def load_model(config, weights, attn, seed):
    """The model in fp32 on the CPU, with pretrained weights or, if these are None, random ones."""
    torch.manual_seed(seed)
    options = {
        "attn_implementation": None if attn == "auto" else attn,  # None: PyTorch's own, mostly
        "dtype": torch.float32,
        "trust_remote_code": False,
    }
    if weights is None:
        return transformers.AutoModelForCausalLM.from_config(config, **options)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        weights, config=config, output_loading_info=True, **options
    )
    if info["missing_keys"]:
        fail(f"--model-name {weights}: it lacks weights for {sorted(info['missing_keys'])[:3]}")
    return model.train()


def find_weights(model, name):
    """Returns a pretrained model's safetensors files, and how to turn them into parameters.

    The tensors in the files may have other names than the parameters, or be parts of them: the
    conversions of transformers describe this. The list of files is empty if there are none, if
    `name` is None, or if a rank could not tell which part of a file its shard is."""
    conversions = get_model_conversion_mapping(model)
    for conversion in conversions:
        for operation in getattr(conversion, "operations", []):
            # A shard has some of the rows (dimension 0). It can be read if the operation turns each
            # tensor (an expert) into a row, or leaves the order of the rows as it is.
            keeps_rows = isinstance(operation, Concatenate) and operation.dim > 0
            if not isinstance(operation, MergeModulelist) and not keeps_rows:
                return [], conversions
    if name is None or hasattr(model.config, "quantization_config"):
        return [], conversions

    find = partial(cached_file, name, _raise_exceptions_for_missing_entries=False)
    files = [find("model.safetensors")]
    index = find("model.safetensors.index.json")
    if files == [None] and index is not None:
        names = set(json.loads(Path(index).read_text())["weight_map"].values())
        files = [cached_file(name, file) for file in sorted(names)]
    return [file for file in files if file is not None], conversions


def read_shards(model, name, files, conversions, device):
    """Reads the values of this rank's shards, as fp32, from safetensors files."""
    # Without this, transformers reads with several threads, which takes more memory.
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    if dist.get_rank() > 0:
        transformers.logging.disable_progress_bar()
    options = LoadStateDictConfig(
        dtype=torch.float32, device_map={"": device}, weight_mapping=conversions
    )
    tensors = {}
    for path in files:
        file = safe_open(path, framework="pt")
        tensors.update({key: file.get_slice(key) for key in file.keys()})  # noqa: SIM118
    # This is what from_pretrained calls. Of a DTensor it reads the part that this rank has.
    convert_and_load_state_dict_in_model(model, tensors, options)
    model.tie_weights()  # such as the output layer, if it has the weights of the embeddings

    for key in [name for name, _ in model.named_parameters()]:
        parameter = model.get_parameter(key)
        # If a parameter has fewer rows than there are ranks, the last ranks have no rows to read.
        if parameter.is_meta and parameter.to_local().numel() == 0:
            shard = torch.empty_like(parameter, device=device)
        elif parameter.is_meta:
            fail(f"--model-name {name}: it lacks weights for {key}")
        else:
            # A DTensor is always created on the GPU. With --cpu-offload it must be on the CPU.
            # It may be a view of a larger tensor. Stage 05 could not save that, so it is copied.
            shard = parameter.detach().to(device, copy=True)
        owner, _, attribute = key.rpartition(".")
        setattr(model.get_submodule(owner), attribute, torch.nn.Parameter(shard))
    model.tie_weights()  # again, because the parameters are new


def fill_from_rank_0(model, full_model, device):
    """Copies the weights of `full_model`, which only rank 0 has, to the shards of all ranks.

    It would be shorter to call reset_parameters() on each rank. But its random weights are not
    those that transformers gives to this architecture."""
    model.to_empty(device=device)
    weights = full_model.state_dict() if full_model is not None else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)


def fill_buffers(model, device):
    """Computes the buffers that no file has, such as the frequencies of rotary embeddings."""
    computed = dict(model.named_non_persistent_buffers())
    for name, buffer in list(model.named_buffers()):
        has_values = name not in computed and not buffer.is_meta
        buffer = buffer.to(device) if has_values else torch.empty_like(buffer, device=device)
        buffer._is_hf_initialized = has_values
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, buffer)

    # initialize_weights skips tensors that this attribute marks as already having their values.
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    model.initialize_weights()


class GradientCompressor:
    """Averages gradients over the replicas of the model: a hook for FSDP's all-reduce.

    FSDP calls it with one module's gradient at a time, this rank's shard of it, (n,) fp32. What
    the replicas send depends on `mode`:
    - none: all values in fp32, by an all-reduce of PyTorch's,
    - bf16, int8, int4: all values, rounded,
    - randk: `keep_ratio` of the values of each chunk, at random indices, rounded to `wire_dtype`,
    - dct: the same for the spectrum of each chunk (discrete cosine transform).
    What is not sent in randk and dct counts as 0. `lap` is RunLog.lap."""

    def __init__(self, group, mode, keep_ratio, chunk, wire_dtype, is_compiled, cpu_offload, lap):
        self.group = group
        self.mode = mode
        self.chunk = chunk
        self.num_kept = max(1, round(keep_ratio * chunk))
        self.wire_dtype = wire_dtype if mode in ("randk", "dct") else mode
        self.encode, self.decode = encode, decode
        if is_compiled:
            self.encode = torch.compile(encode, dynamic=False)
            self.decode = torch.compile(decode, dynamic=False)
        self.cpu_offload = cpu_offload
        self.lap = lap
        self.is_last = True  # whether the micro-batch is the last one of its step
        self.sums = {}  # the gradients of the micro-batches before, by module

    def start_step(self, step, device):
        """Chooses the indices of this step, and counts its bytes from zero.

        All replicas must send the same indices, or their values could not be averaged. The indices
        change in each step, or some parameters would never be trained (arXiv:1610.05492)."""
        generator = torch.Generator().manual_seed(step)
        indices = torch.randperm(self.chunk, generator=generator)[: self.num_kept]
        self.indices = indices.to(device, non_blocking=True)
        self.bytes_sent = 0.0
        self.bytes_uncompressed = 0.0

    def ratio(self):
        """Bytes that this step would send without compression, divided by those that it sent."""
        return self.bytes_uncompressed / self.bytes_sent if self.bytes_sent else 1.0

    def __call__(self, module, gradient):
        """Adds the gradients of earlier micro-batches. In the last one, averages over the replicas.

        Both change `gradient` in place."""
        self.lap("backward")  # the time since the last lap was spent on the backward pass

        # FSDP made the gradient in another CUDA stream, which may reuse its memory as soon as
        # nothing refers to it. `record_stream` delays that until this stream is done with it.
        if gradient.is_cuda and (not self.is_last or self.cpu_offload):
            gradient.record_stream(torch.cuda.current_stream())

        if module in self.sums:
            gradient += self.sums.pop(module)
        if not self.is_last:
            self.sums[module] = gradient
            return

        replicas = self.group.size()
        bytes_uncompressed = 2 * (replicas - 1) / replicas * gradient.nbytes
        self.bytes_uncompressed += bytes_uncompressed
        if self.mode == "none":
            self.bytes_sent += bytes_uncompressed
            dist.all_reduce(gradient, group=self.group)
            gradient.div_(replicas)
            return

        if self.mode in ("randk", "dct"):
            mean = self.average_subset(gradient)
        else:
            mean = self.average_all(gradient)
        gradient.copy_(mean)
        self.lap("encode")

    def average_subset(self, gradient):
        """The mean of the values at `self.indices` of each chunk, 0 elsewhere: (n,) fp32."""
        rows = pad(gradient, self.chunk).view(-1, self.chunk)
        if self.mode == "dct":
            rows = rows @ dct_basis(self.chunk, gradient.device).T

        # The indices are shifted from chunk to chunk. Otherwise, if the rows of a matrix are as
        # long as a chunk, some columns would be sent whole and others not at all. The number comes
        # from Knuth's multiplicative hashing: it spreads the shifts evenly over the chunk.
        row_numbers = torch.arange(len(rows), device=rows.device)[:, None]
        indices = (self.indices + (row_numbers * 2654435761 >> 16)) % self.chunk

        sent = rows.gather(1, indices).flatten()
        # If any value is NaN or infinite, everything that is sent becomes NaN. Otherwise such a
        # value would go unnoticed if it is among those that are not sent.
        sent = sent + 0 * gradient.sum()
        mean = self.average_all(sent).view_as(indices)
        rows = torch.zeros_like(rows).scatter_(1, indices, mean)
        if self.mode == "dct":
            rows = rows @ dct_basis(self.chunk, gradient.device)
        return rows.flatten()[: len(gradient)]

    def average_all(self, values):
        """The mean over the replicas of `values`, (n,) fp32, sent as `self.wire_dtype`.

        An all-reduce would add up the encoded values: sums of integers would overflow, and sums in
        bf16 would be rounded. So each rank receives one part of the values from all others, decodes
        it, averages it in fp32, and sends the mean to all. These are the two phases of a ring
        all-reduce, reduce-scatter and all-gather, and they send as many values."""
        replicas = self.group.size()
        rows = self.encode(pad(values, ROW_LENGTH * replicas), self.wire_dtype)
        parts = torch.empty_like(rows)
        self.lap("encode")

        dist.all_to_all_single(parts, rows, group=self.group)
        self.lap("communicate")

        mean = self.decode(parts, self.wire_dtype).view(replicas, -1).mean(0)
        mean = self.encode(mean, self.wire_dtype)
        self.lap("encode")

        all_gather_into_tensor(rows, mean, group=self.group)
        self.lap("communicate")

        self.bytes_sent += 2 * (replicas - 1) / replicas * rows.nbytes
        return self.decode(rows, self.wire_dtype)[: len(values)]


def pad(values, multiple):
    """`values`, (n,), followed by zeros if n is not a multiple of `multiple`."""
    padding = -len(values) % multiple
    return F.pad(values, (0, padding)) if padding > 0 else values


@cache
def dct_basis(chunk, device):
    """The orthonormal DCT-II as a matrix, (chunk, chunk) fp32: a row for each frequency.

    Its transpose is its inverse. Source: Ahmed, Natarajan, Rao: Discrete Cosine Transform. IEEE
    Transactions on Computers, 1974."""
    n = torch.arange(chunk, dtype=torch.float64)
    basis = (2 / chunk) ** 0.5 * torch.cos(torch.pi / chunk * (n + 0.5) * n[:, None])
    basis[0] /= 2**0.5
    return basis.float().to(device)


def encode(values, dtype):
    """Encodes fp32 values, (n,), as uint8, a row of bytes for each ROW_LENGTH values.

    n must be a multiple of ROW_LENGTH. Integers are multiples of their row's `scale`, an fp32
    number that is stored after them: the largest magnitude in the row, divided by the largest
    integer. If a value is not finite, the scale is not, and neither is what `decode` returns."""
    rows = values.view(-1, ROW_LENGTH)
    if dtype in WIRE_FLOATS:
        return rows.to(WIRE_FLOATS[dtype]).view(torch.uint8)

    scale = rows.abs().amax(dim=1, keepdim=True) / WIRE_INTEGERS[dtype]
    scale.clamp_(min=torch.finfo(torch.float32).tiny)  # of a row of zeros
    integers = (rows / scale).round().to(torch.int8)
    if dtype == "int4":
        integers = integers[:, ::2] << 4 | integers[:, 1::2] & 15  # two in a byte
    return torch.cat([integers.view(torch.uint8), scale.view(torch.uint8)], dim=1)


def decode(rows, dtype):
    """The values, (n,) fp32, of rows from `encode`."""
    if dtype in WIRE_FLOATS:
        return rows.view(WIRE_FLOATS[dtype]).float().flatten()

    integers = rows[:, :-4].view(torch.int8)
    scale = rows[:, -4:].contiguous().view(torch.float32)
    if dtype == "int4":
        # >> keeps the sign, so << 4 >> 4 gives the low half its sign.
        integers = torch.stack([integers >> 4, integers << 4 >> 4], dim=2).flatten(1)
    return (integers * scale).flatten()


@torch.compiler.set_stance("force_eager")
@torch.no_grad()
def check_causal(model, seq_length, device):
    """Ends the run if a token changes what the model predicts before it.

    A model that reads in both directions, such as BERT, sees the token that it has to predict. Its
    loss becomes very small, but the model still cannot generate text."""
    half = seq_length // 2
    vocab_size = model.config.vocab_size
    tokens = torch.arange(seq_length)[None] % vocab_size
    other_tokens = tokens.clone()
    other_tokens[:, half:] = (other_tokens[:, half:] + 1) % vocab_size
    logits = model(input_ids=tokens.to(device), use_cache=False).logits[:, :half]
    same_logits = model(input_ids=tokens.to(device), use_cache=False).logits[:, :half]
    other_logits = model(input_ids=other_tokens.to(device), use_cache=False).logits[:, :half]
    # FSDP frees parameters in the backward pass, and here is none.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()

    # The same numbers in the same shapes are rounded alike, but not in a mixture of experts, where
    # the shapes depend on how many tokens an expert gets. And kernels of a GPU might add in another
    # order each time: then the same tokens do not give the same logits either.
    has_experts = any("experts" in name for name, _ in model.named_modules())
    tolerance = (0.1 if has_experts else 1e-5) * logits.abs().max()
    tolerance += 10 * (logits - same_logits).abs().max()
    if (logits - other_logits).abs().max() > tolerance:
        problem = "not causal: a token changes what the model predicts before that token"
        fail(f"--model-name {model.config.name_or_path}: {problem}")


def flops_per_token(model, seq_length):
    """Floating-point operations per token, forward and backward: 6 N + 12 L H D T.

    N is the number of parameters. An input embedding does not count, unless it is also the output
    layer. The second term is attention without its causal mask: L layers, H heads of D dimensions,
    sequences of T tokens.
    Source: PaLM, arXiv:2204.02311, appendix B."""
    config = model.config
    embeddings = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    output_layer = model.get_output_embeddings()
    if output_layer is not None:
        embeddings.discard(output_layer.weight)
    parameters = model.num_parameters() - sum(weight.numel() for weight in embeddings)

    heads = getattr(config, "num_attention_heads", 0)
    head_dim = vars(config).get("head_dim")
    if head_dim is None and heads > 0:
        head_dim = config.hidden_size / heads
    attention = 12 * config.num_hidden_layers * heads * (head_dim or 0) * seq_length
    return 6 * parameters + attention


def peak_flops(device_name):
    """Peak FLOP/s of a device, or 0 if it is unknown: then MFU is not logged."""
    for name, peak in PEAK_FLOPS.items():
        if name in device_name:
            return peak
    return 0


def share_of_rank(indices):
    """Returns this rank's part of `indices`, and how many of its entries count.

    The backward pass contains collectives, for which all ranks wait. So every rank needs the same
    number of micro-batches. If the indices cannot be divided equally, the last ranks get one more
    sequence that does not count: its targets are all -100, so it adds nothing to the loss."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    share = list(indices[rank::world_size])
    num_real = len(share)
    if num_real < math.ceil(len(indices) / world_size):
        share.append(indices[0])
    return share, num_real


def make_micro_batches(data, indices, batch_size, device):
    """Loads this rank's share of the sequences with these indices, in micro-batches.

    Returns a list of (input_ids, targets), int64 tensors of shape (B, T) on the device, and the
    number of targets, a CPU tensor. targets[:, i] is the token that follows input_ids[:, i], or
    -100 where the loss leaves it out."""
    share, num_real = share_of_rank(indices)
    micro_batches = []
    num_targets = torch.tensor(0)
    for first in range(0, len(share), batch_size):
        rows = data[share[first : first + batch_size]]
        input_ids = rows["input_ids"]
        labels = rows.get("labels", input_ids)
        targets = F.pad(labels[:, 1:], (0, 1), value=-100)  # nothing follows the last token
        targets[num_real - first :] = -100  # of the sequence that does not count
        num_targets += (targets != -100).sum()

        # From pinned memory the copy to the GPU is asynchronous: Python does not wait for it.
        if device.type == "cuda":
            input_ids = input_ids.pin_memory().to(device, non_blocking=True)
            targets = targets.pin_memory().to(device, non_blocking=True)
        micro_batches.append((input_ids, targets))
    return micro_batches, num_targets


def loss_sum(model, input_ids, targets, cross_entropy):
    """The sum of the loss over all targets, in nats: a scalar on the device.

    `cross_entropy` is `sum_cross_entropy`, compiled or not."""
    logits = model(input_ids=input_ids, use_cache=False).logits
    return cross_entropy(logits, targets)


def sum_cross_entropy(logits, targets):
    """Cross-entropy of logits, (B, T, V), and targets, (B, T), computed in fp32: a scalar."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


# "force_eager" runs compiled blocks as if they were not compiled. Otherwise torch.compile would
# compile them again for this function, because without gradients they need other code.
@torch.compiler.set_stance("force_eager")
@torch.no_grad()
def evaluate(model, data, batch_size, device):
    """Mean loss over the targets of `data` in nats, and the perplexity, as metrics.

    There is no model.eval(): dropout is 0 in training too."""
    micro_batches, num_targets = make_micro_batches(data, range(len(data)), batch_size, device)
    total = torch.zeros((), device=device)
    for input_ids, targets in micro_batches:
        total += loss_sum(model, input_ids, targets, sum_cross_entropy)
    model.reshard()  # the root module stays gathered until a backward pass, and here is none
    dist.all_reduce(total)
    dist.all_reduce(num_targets)
    loss = (total.cpu().double() / num_targets).item()  # NaN if there is no target
    return {"eval/loss": loss, "eval/perplexity": float(np.exp(loss))}


@torch.compiler.set_stance("force_eager")
@torch.no_grad()
def sample(model, tokens, start, device):
    """Replaces tokens[start:], of shape (T,), by tokens sampled from the model."""
    tokens = tokens[None].clone()
    generator = torch.Generator().manual_seed(0)
    for i in range(start, tokens.shape[1]):
        # The whole sequence each time, so that the shape stays the same. The old tokens after i do
        # no harm: attention is causal.
        logits = model(input_ids=tokens.to(device), use_cache=False).logits
        logits = logits[0, i - 1].float().cpu() / 0.8  # temperature: below 1 is less random
        probabilities = logits.nan_to_num().softmax(0)  # NaN, if training has diverged
        tokens[0, i] = torch.multinomial(probabilities, 1, generator=generator)
    model.reshard()  # as in `evaluate`
    return tokens[0]


def choose_prompt(sequence, length):
    """Returns tokens for `sample`, of shape (T,), and how many of them are the prompt.

    For a text, the prompt is its first 32 tokens. For instruction data, it ends where an answer
    begins. At most `length` tokens follow the prompt."""
    input_ids = sequence["input_ids"]
    start = min(32, len(input_ids) // 2)
    if "labels" in sequence:
        is_target = sequence["labels"] != -100
        answers = (is_target[1:] & ~is_target[:-1]).nonzero()
        if len(answers) > 0:
            start = answers[0].item() + 1
    return input_ids[: start + length], start


def say_what_is_left(run_dir):
    """Says where the trained model is, or how to keep that of the next run."""
    if run_dir is None:
        say("nothing was kept: with -e NAME a run is saved, and the same command resumes it")
        return
    folder = (run_dir / "final_model").resolve()
    say(f'to load the model: transformers.AutoModelForCausalLM.from_pretrained("{folder}")')


def parse_args():
    """Returns the flags: from the command line, else from the run's checkpoint, else defaults."""
    parser = argparse.ArgumentParser(
        fromfile_prefix_chars="@",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.convert_arg_line_to_args = shlex.split  # @FILE reads flags from a file
    parser.error = partial(report_mistake, parser)
    # A switch has two forms, such as --compile and --no-compile. Without either it is None.
    switch = {"action": argparse.BooleanOptionalAction}
    parser.set_defaults(from_scratch=False, train_on_prompt=False)

    add = parser.add_argument_group("run").add_argument
    name_help = "save the run in SAVE_DIR/NAME, and resume it there"
    add("-e", "--experiment-name", type=one_line, help=name_help)
    folder_help = "folder for all runs, default: %(default)s"
    add("--save-dir", type=one_line, default=str(ROOT / "outputs"), help=folder_help)
    seed_help = "of the order of the data and of random weights, default: %(default)s"
    add("--seed", type=zero_or_more(int), default=0, help=seed_help)
    add("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    add("--dtype", choices=tuple(DTYPES), help="default: bf16 on a GPU, fp32 on a CPU")
    add(
        "--export-dtype",
        choices=tuple(DTYPES),
        default="fp32",
        help="of the weights in final_model, default: %(default)s",
    )
    log_help = "steps between log lines, default: %(default)s"
    add("--log-freq", type=positive(int), default=10, help=log_help)
    checkpoint_help = "steps between checkpoints, default: %(default)s"
    add("--ckpt-freq", type=positive(int), default=500, help=checkpoint_help)
    keep_help = "how many of the newest checkpoints to keep, default: %(default)s"
    add("--keep-checkpoints", type=positive(int), default=2, help=keep_help)
    add("--comet-project-name", type=one_line, default="train-llm", help="default: %(default)s")
    add("--comet-workspace", type=one_line, help="default: the one of your account")
    add("--comet-offline", help="archives to upload later; needs no account", **switch)

    add = parser.add_argument_group("model and data").add_argument
    model_help = "tiny, a hub id, or a folder, default: %(default)s"
    add("-m", "--model-name", type=one_line, default="tiny", help=model_help)
    add("--from-scratch", help="take the architecture only, not the weights", **switch)
    attn_help = "a name that transformers knows, default: %(default)s, PyTorch's own"
    add("--attn", type=one_line, default="auto", help=attn_help)
    add("--activation-checkpointing", help="less memory, up to a third more compute", **switch)
    add("--cpu-offload", help="keep shards and optimizer in the memory of the CPU", **switch)
    add(
        "--no-reshard-after-forward",
        "--keep-gathered",
        action="store_true",
        help="gather parameters once a step: faster, more memory",
    )
    opposite = {"dest": "no_reshard_after_forward", "action": "store_false"}
    add("--reshard-after-forward", help="the opposite, and the default", **opposite)
    add("--compile", help="torch.compile blocks and loss; default: on a GPU", **switch)
    data_help = "dummy, a hub id, a file, or a folder, default: %(default)s"
    add("-d", "--dataset-name", type=one_line, default="python-docs", help=data_help)
    add("--dataset-subset", type=one_line, help="the configuration of a data set on the hub")
    column_help = "train on this column, default: found by the names of the columns"
    add("--text-column", type=one_line, help=column_help)
    prompt_help = "of instruction data, train on the prompts too, default: on the answers only"
    add("--train-on-prompt", help=prompt_help, **switch)
    length_help = "tokens of a sequence, default: 1024, or the model's limit"
    add("-s", "--seq-length", type=positive(int), help=length_help)
    batch_help = "sequences of a micro-batch, default: %(default)s"
    add("-b", "--batch-size", type=positive(int), default=8, help=batch_help)
    global_help = "sequences of an optimizer step, default: %(default)s"
    add("--global-batch-size", type=positive(int), default=32, help=global_help)
    eval_help = "steps between evaluations, default: %(default)s, only at the end"
    add("--eval-freq", type=zero_or_more(int), default=0, help=eval_help)
    sequences_help = "how many to evaluate at most, default: %(default)s"
    add("--eval-sequences", type=positive(int), default=256, help=sequences_help)

    add = parser.add_argument_group("optimization").add_argument
    epochs_help = "passes over the training data, default: %(default)s"
    add("--num-epochs", type=positive(int), default=3, help=epochs_help)
    add("--max-steps", type=positive(int), help="end the run here, default: after --num-epochs")
    lr_help = "learning rate, default: 1e-3 from scratch, 2e-5 with loaded weights"
    add("--lr", type=positive(float), help=lr_help)
    schedulers = "linear cosine cosine_with_restarts polynomial constant constant_with_warmup"
    scheduler_help = "default: %(default)s"
    add("--lr-scheduler", choices=schedulers.split(), default="cosine", help=scheduler_help)
    add("--warmup-steps", type=zero_or_more(int), help="default: a tenth of the run, at most 100")
    decay_help = "of matrices only, default: %(default)s"
    add("--weight-decay", type=zero_or_more(float), default=0.01, help=decay_help)
    add("--max-grad-norm", type=positive(float), default=1.0, help="default: %(default)s")

    add = parser.add_argument_group("gradients between replicas").add_argument
    add("--shard-size", type=positive(int), help="processes per replica, default: those of a node")
    modes = ("none", "bf16", "int8", "int4", "randk", "dct")
    mode_help = "every mode except none loses precision, default: %(default)s"
    add("--compression", choices=modes, default="int8", help=mode_help)
    keep_help = "the part of the values that randk and dct send, default: %(default)s"
    add("--keep-ratio", "--keep", "--dct-keep", type=positive(float), default=0.5, help=keep_help)
    chunks = {"choices": (64, 128, 256, 512), "default": 256}
    chunk_help = "values per chunk, for randk and dct, default: %(default)s"
    add("--chunk", "--dct-chunk", type=int, help=chunk_help, **chunks)
    wire_dtypes = (*WIRE_FLOATS, *WIRE_INTEGERS)
    wire_help = "how randk and dct send values, default: %(default)s"
    add("--wire-dtype", choices=wire_dtypes, default="int8", help=wire_help)

    # A run that is resumed keeps its flags, unless the command line sets them. So the flags are
    # parsed twice: first to find the run, then with its flags as the defaults.
    files = [word for word in sys.argv[1:] if word.startswith("@")]
    with reading(f"the flags in {' '.join(files)}"):
        args = parser.parse_args()
    stored = newest_values(run_dir_of(args))
    flags = stored.get("flags", {})
    kept = vars(args).keys() & flags.keys() - {"experiment_name", "save_dir"}
    parser.set_defaults(**{name: flags[name] for name in kept})
    args = parser.parse_args()

    check_launcher()
    check_hardware(args)
    check_compression(args)
    if stored:
        check_same_experiment(args, stored)
        for name in sorted(kept):
            if getattr(args, name) != flags[name]:
                say(f"--{name.replace('_', '-')} {flags[name]} → {getattr(args, name)}")
    return args


# What some flags are called in other training programs.
OTHER_NAMES = {
    "--learning-rate": "--lr",
    "--epochs": "--num-epochs",
    "--num-train-epochs": "--num-epochs",
    "--steps": "--max-steps",
    "--per-device-train-batch-size": "--batch-size",
    "--gradient-accumulation-steps": "--global-batch-size",
    "--gradient-checkpointing": "--activation-checkpointing",
    "--bf16": "--dtype bf16",
    "--fp16": "--dtype fp16",
    "--max-length": "--seq-length",
    "--block-size": "--seq-length",
    "--model-name-or-path": "--model-name",
    "--dataset-text-field": "--text-column",
    "--output-dir": "--save-dir",
    "--run-name": "--experiment-name",
    "--logging-steps": "--log-freq",
    "--eval-steps": "--eval-freq",
    "--save-steps": "--ckpt-freq",
    "--resume": "--experiment-name",
}


def report_mistake(parser, message):
    """Ends the run after a mistake in the flags: one line, as for all other errors."""
    flags = re.findall(r"--[a-z-]+", parser.format_help())
    hint = ""
    if message.startswith("unrecognized"):
        for wrong in re.findall(r"--[\w-]+", message):
            wrong = wrong.replace("_", "-")
            similar = difflib.get_close_matches(wrong, flags, n=1, cutoff=0.75)
            meant = OTHER_NAMES.get(wrong) or "".join(similar)
            if meant:
                hint += f"{meant} may be meant, "
    fail(f"{message}; {hint}--help lists all flags")


def positive(convert):
    """A `type` for flags: an int or a float above 0."""
    return in_range(convert, lambda value: 0 < value < 2**63, "above 0 and below 2**63")


def zero_or_more(convert):
    """A `type` for flags: an int or a float that is not negative."""
    return in_range(convert, lambda value: 0 <= value < 2**63, "at least 0 and below 2**63")


def one_line(text):
    """A `type` for flags: a text that files and messages can show, such as a name or a path."""
    if text.splitlines() != [text] or any(0xD800 <= ord(letter) < 0xE000 for letter in text):
        raise argparse.ArgumentTypeError(f"{text!a}: must be a line of text")
    return text


def in_range(convert, is_allowed, description):
    def parse(text):
        value = convert(text)
        if not is_allowed(value):
            raise argparse.ArgumentTypeError(f"{text}: must be {description}")
        return value

    parse.__name__ = convert.__name__  # argparse prints it: "invalid int value"
    return parse


def check_launcher():
    """Ends the run if it was started in a way that this stage does not support."""
    variables = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
    if not all(os.environ.get(name) for name in variables.split()):
        num_processes = torch.cuda.device_count() or 2
        command = ["torchrun", "--standalone", "--nproc-per-node", str(num_processes), *sys.argv]
        fail(f"this stage needs torchrun: {shlex.join(command)}")


def check_hardware(args):
    """Ends the run if a flag asks for what this machine does not have. Sets the default dtype."""
    gpu = args.device != "cpu" and torch.cuda.is_available()
    if args.dtype is None:
        # GPUs from before 2020, such as V100 and T4, do not compute in bf16.
        has_bf16 = gpu and torch.cuda.is_bf16_supported(including_emulation=False)
        args.dtype = "bf16" if has_bf16 else "fp16" if gpu else "fp32"
    if args.device == "cuda" and not gpu:
        fail("--device cuda: PyTorch finds no GPU here")
    if gpu and int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count():
        fail(f"--nproc-per-node: there are only {torch.cuda.device_count()} GPUs here")
    if args.dtype == "fp16" and not gpu:
        fail("--dtype fp16: its gradient scaling is for a GPU, a CPU has bf16 and fp32")
    if args.cpu_offload and not gpu:
        fail("--cpu-offload: without a GPU everything is in the memory of the CPU already")
    if args.cpu_offload and args.dtype == "fp16":
        fail("--cpu-offload: is not supported with fp16, use bf16")
    compiler = os.environ.get("CXX", "g++")
    if args.compile and not gpu and shutil.which(compiler) is None:
        fail(f"--compile: needs the compiler {compiler} (Debian: apt-get install g++)")
    if args.attn.startswith("flash") and (not gpu or args.dtype == "fp32"):
        fail(f"--attn {args.attn}: needs a GPU, and --dtype bf16 or fp16")


def check_compression(args):
    """Ends the run if the processes do not form whole replicas, or --keep-ratio is above 1."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    shard_size = args.shard_size or int(os.environ["LOCAL_WORLD_SIZE"])
    if world_size % shard_size > 0:
        fail(f"--shard-size {shard_size}: does not divide {world_size} processes")
    if args.keep_ratio > 1:
        fail(f"--keep-ratio {args.keep_ratio}: must be above 0 and at most 1")


def run_dir_of(args):
    """The folder of a named run. A run without a name has none."""
    return Path(args.save_dir, args.experiment_name) if args.experiment_name else None


def newest_values(run_dir):
    """What state.json holds in the run's newest readable checkpoint, {} if there is none."""
    if run_dir:
        with reading(f"--save-dir {run_dir}"):
            for _, values in checkpoints(run_dir):
                if values:
                    return values
    return {}


def experiment(args):
    """The flags that must be the same when the run is resumed."""
    return {name: getattr(args, name) for name in EXPERIMENT_FLAGS}


def check_same_experiment(args, stored):
    """Ends the run if the checkpoint in its folder belongs to another experiment."""
    here = experiment(args)
    # Checkpoints of version 0.1 have the flags only, and not all of them.
    there = stored.get("experiment", {name: stored["flags"].get(name) for name in here})
    there = {"train_on_prompt": False, **there}
    for name in {**here, **there}:
        is_checked_later = name in CONTENT_FLAGS and "contents" in stored  # in `check_contents`
        if here.get(name) != there.get(name) and not is_checked_later:
            flag = f"--{name.replace('_', '-')} {here.get(name)}"
            fail(f"{flag}: the run in {run_dir_of(args)} has {there.get(name)}")


def check_contents(args, contents):
    """Ends the run if model, tokenizer or data are not those of the checkpoint in its folder."""
    run_dir = run_dir_of(args)
    stored = newest_values(run_dir)
    there = stored.get("contents", {})  # version 0.1 has none
    for name, value in there.get("config", {}).items():
        here = contents["config"].get(name, value)
        if isinstance(here, dict) and isinstance(value, dict):
            # Another version of transformers may have further keys.
            here = {key: here.get(key, value[key]) for key in value}
        if here != value:
            change = f"{name} is {here}, in the run in {run_dir} it is {value}"
            fail(f"--model-name {args.model_name}: {change}")
    for name, value in there.items():
        if name != "config" and contents[name] != value:
            flag = "model_name" if name == "tokenizer" else "dataset_name"
            here = f"--{flag.replace('_', '-')} {getattr(args, flag)}"
            # Flags that differ from those of the run may be the reason.
            reasons = ""
            for other in CONTENT_FLAGS:
                if stored["flags"].get(other) != getattr(args, other):
                    reasons += f" --{other.replace('_', '-')} {stored['flags'].get(other)}"
            fail(f"{here}: the {name} differs from that of the run in {run_dir}{reasons}")


def check_same_on_all_ranks(args, contents):
    """Ends the run if a rank has another experiment, such as other files with the same names."""
    here = {**experiment(args), **contents}
    for rank, there in enumerate(all_gather_object(here)):
        for name in here:
            if here[name] != there[name]:
                values = f"{here[name]!s:.200} here and {there[name]!s:.200} on rank {rank}"
                fail(f"{name} is {values}: all ranks need the same flags and files")


def open_run_dir(args):
    """Creates the folder of a named run, and returns its path. None for a run without a name."""
    run_dir = run_dir_of(args)
    # If the folder is not writable, the run ends here, before anything is loaded.
    try:
        if run_dir:
            run_dir.mkdir(parents=True, exist_ok=True)
            lock_run_dir(run_dir)
            (run_dir / "metrics.jsonl").touch()
    except OSError as error:
        fail(f"--save-dir {args.save_dir}: {error}")
    return run_dir


def end_interrupted(args):
    """Ends the run after Ctrl-C, and says what is left of it."""
    run_dir = run_dir_of(args)
    if run_dir is None:
        left = "nothing was kept: with -e NAME a run is saved, and can be resumed"
    else:
        step = newest_values(run_dir).get("step", 0)
        left = f"the same command goes on from step {step}"
    if int(os.environ["RANK"]) == 0:
        say_last(f"stopped by Ctrl-C, {left}")
    sys.exit(130)  # 128 + the number of SIGINT, as shells have it


def end_with_torchrun():
    """Ends this process when torchrun has ended, even if kill -9 kept torchrun from signaling it.

    Otherwise the process would go on by itself: nobody reads what it prints, and a second start of
    the run would find its folder locked. The thread checks for as long as the process lives, even
    while the script waits in a collective."""

    def watch():
        while os.getppid() == PARENT:
            time.sleep(1)
        os._exit(1)

    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=watch, daemon=True).start()


def shut_down():
    """Ends the process group after success. After an error other ranks may never reach the barrier.

    A process that exits while Gloo's threads still run may abort (pytorch#179291), and torchrun
    would report that the run has failed. So first release what holds such threads, and wait until
    they have ended."""
    gc.collect()
    dist.barrier()
    time.sleep(0.2)
    dist.destroy_process_group()


if __name__ == "__main__":
    end_with_torchrun()
    try:
        args = parse_args()
        main(args)
    except KeyboardInterrupt:
        end_interrupted(args)
    shut_down()

"""Stage 06: streaming. Documents are read and tokenized when a step needs them.

Try it; train on a text of your own; train a pretrained model further. Without -e nothing is saved.

    torchrun --standalone --nproc-per-node 2 train-llm.py
    torchrun --standalone --nproc-per-node 2 train-llm.py -e notes -d notes.txt --max-steps 200
    torchrun --standalone --nproc-per-node 8 train-llm.py -e web -d 'web/*.jsonl' -m gpt2
"""

import argparse
import glob
import gzip
import itertools
import json
import math
import os
import re
import signal
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
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import transformers
from logs_and_checkpoints import (
    LOCAL_RANK,
    WORLD_SIZE,
    RunLog,
    checkpoint_tensors,
    complete_checkpoint,
    fail,
    flops_per_token,
    load_checkpoint,
    memory_gb,
    open_run_dir,
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
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

transformers.logging.set_verbosity_error()  # hides warnings
transformers.logging.disable_progress_bar()
# In each forward pass transformers asks the GPU whether a row is several sequences that must not
# attend to each other, and Python waits for the answer. Here it never is, and None says so.
transformers.masking_utils.find_packed_sequence_indices = lambda position_ids: None

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Defaults. beta2, which is no flag, is the decay rate of AdamW's second moment in each step.
FROM_SCRATCH = {"lr": 2e-3, "weight_decay": 0.1, "beta2": 0.95}
PRETRAINED = {"lr": 2e-5, "weight_decay": 0.01, "beta2": 0.999}
# What `-m tiny` means: the config and tokenizer of a small model, without weights.
TINY = ROOT / "tiny"
# Gradients are compressed in chunks of this many values.
CHUNK_LENGTH = 256


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
    if WORLD_SIZE % args.shard_size > 0:
        fail(f"--shard-size {args.shard_size}: does not divide {WORLD_SIZE} processes")
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
    # The ranks must call the collectives of a group in the same order. A checkpoint is saved in a
    # thread, in parallel with the steps, so it has a group of its own. So has the count of signals,
    # which are on the CPU.
    saving_group = dist.new_group(backend="gloo", timeout=timeout)
    signal_group = dist.new_group(backend="gloo", timeout=timeout)
    if run_dir and not (run_dir / "lock").exists():  # rank 0 has created it
        fail(f"--save-dir {args.save_dir}: all nodes must share this folder")

    # Data: sequences of one length, cut from the documents.
    config = load_config(args.model_name)
    tokenizer = load_tokenizer(args.model_name, args.dataset_name)
    documents, eval_data, seq_length = load_data(args, config, tokenizer)
    experiment = check_data(args, config, documents, eval_data, seq_length)
    eval_data = eval_data.select(range(min(len(eval_data), args.eval_sequences)))

    # A mesh is a table of the ranks. Those that differ in one of its dimensions alone form a group.
    #   "shard": they train on different tokens, and have different shards of the same parameters.
    #   "replicate": they train on different tokens, and have the same shards of the parameters.
    # A shard group holds one replica of the model. Parameters are gathered within it, where links
    # are fast: on one machine. Between replicas only gradients are sent.
    num_replicas = WORLD_SIZE // args.shard_size
    compression = args.compression if num_replicas > 1 else "none"
    mesh = init_device_mesh(
        device.type, (num_replicas, args.shard_size), mesh_dim_names=("replicate", "shard")
    )
    say(f"{num_replicas} replica(s) of {args.shard_size} shard(s), compression {compression}")
    # All ranks share the work of a global batch.
    data_group = dist.group.WORLD
    num_shares = dist.get_world_size(data_group)

    # An optimizer step trains on one global batch: the next sequence of each of the `Streams`.
    total_steps = args.max_steps
    say(
        f"{args.dataset_name}: {documents.num_shards} files, {seq_length} tokens a sequence, "
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

    # When FSDP has averaged the gradients of a module over the shard group, it calls the hook of
    # that module, and ours averages them over the replicas. (Given the whole mesh, FSDP would do so
    # itself, uncompressed.) On a GPU the hook runs in a stream of its own, in parallel with the
    # backward pass. A hook of the root alone would miss the blocks.
    replica_average = ReplicaAverage(mesh.get_group("replicate"), compression, device)
    for module in [*blocks, model]:
        module.set_all_reduce_hook(partial(replica_average, module))

    def forward(input_ids):
        """Logits, (B, T, V), of token ids, (B, T)."""
        logits = model(input_ids=input_ids, use_cache=False).logits
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
    train_data = Streams(documents, tokenizer, flags, config.vocab_size, resumed.get("streams"))
    dist.barrier()  # reading up to the positions may take longer than --timeout

    # How far did the run come before this start?
    previous = newest_metrics(run_dir) if run_dir else {}
    restarts = previous.get("elastic/restarts", -1) + 1  # 0 at the first start
    steps_lost = max(0, previous.get("step", 0) - steps_done)
    if restarts > 0:
        say(f"restart {restarts}: {WORLD_SIZE} processes, {steps_lost} steps are repeated")
    steps_lost += previous.get("elastic/steps_lost", 0)
    log = RunLog(run_dir, steps_done, total_steps, resumed.get("comet_key"), flags, flops)

    # torchrun sends SIGTERM to its processes when a node joins, and when it gets one itself, as
    # from Slurm shortly before the end of a job. The handler only records it. The loop looks at the
    # records in each step, saves a checkpoint and ends, for which torchrun waits at least 30 s.
    stop_signals = []
    signal.signal(signal.SIGTERM, lambda number, frame: stop_signals.append(number))
    stopping = False
    saving = None  # the checkpoint that is being saved
    # All checkpoints are copied to the same memory. A stager of PyTorch 2.11 can be used only once.
    options = dcp.staging.StagingOptions(False, False, False, False)  # no threads, nothing pinned
    stager = dcp.staging.DefaultStager(options) if torch.__version__ >= "2.13" else None

    # From here on a rank that waits in a collective for longer than --timeout ends with an error.
    # Then torchrun starts the processes again, on all nodes (machines) that are left.
    # `dist.set_timeout` is new in PyTorch 2.14.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in (dist.group.WORLD, saving_group, signal_group, *mesh.get_all_groups()):
        set_timeout(timedelta(seconds=args.timeout), group)

    for step in range(steps_done + 1, total_steps + 1):
        # All ranks must stop after the same step, but the signal may reach them in different steps.
        # So all signals are counted, in the background until the step ends.
        num_stop_signals = torch.tensor(len(stop_signals))
        counting = dist.all_reduce(num_stop_signals, group=signal_group, async_op=True)

        # Data: the next sequence of each stream. A resumed run continues exactly where it was,
        # because a checkpoint has the positions of all streams.
        indices = train_data.next_batch()

        micro_batches, num_targets = make_micro_batches(
            train_data, indices, args.batch_size, device, data_group
        )
        dist.all_reduce(num_targets, group=data_group)  # each rank now has the sum of all
        num_targets.clamp_(min=1)  # a batch without any target has loss 0, not 0 / 0
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

            # The replicas average once per step. Until then the hook adds up the gradients of a
            # shard, so they must not add up in `.grad` as well.
            replica_average.is_last = is_last
            optimizer.zero_grad()

            loss = loss_fn(forward(input_ids), targets)
            step_loss += loss.detach()
            log.lap("forward")

            # Divide by the number of targets in the whole global batch, not in the micro-batch.
            # Then every target has the same weight, even if some micro-batches have fewer of them,
            # and the result does not depend on --batch-size.
            # `num_targets` counts the targets of all shares, so their gradients must be added up.
            # They are averaged instead, so multiply by num_shares to get the sum.
            scaler.scale(loss * num_shares / num_targets).backward()
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
        counting.wait()
        stopping = num_stop_signals.item() > 0 and not is_last_step
        is_save_step = run_dir and (step % args.ckpt_freq == 0 or is_last_step or stopping)
        if step == steps_done + 1 or step % args.log_freq == 0 or is_save_step or is_last_step:
            dist.all_reduce(step_loss, group=data_group)
            grad_norm = grad_norm.full_tensor()  # the norms of all shards combined
            metrics = {
                "train/loss": step_loss.item() / num_targets.item(),
                "train/grad_norm": grad_norm.item(),
                "train/learning_rate": lr,
                "train/epoch": train_data.epoch(),
                "train/tokens_seen": step * args.global_batch_size * seq_length,
                "comm/bytes_per_step": sum(replica_average.bytes_sent.values()),
                "elastic/world_size": WORLD_SIZE,
                "elastic/restarts": restarts,
                "elastic/steps_lost": steps_lost,
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
                "streams": train_data.all_positions(signal_group),
                "flags": flags,
                "comet_key": log.comet_key,
                "scaler": scaler.state_dict(),
            }
            if saving:
                saving.result()  # before its memory gets another copy
            # The loop waits until the tensors are copied to the memory of the CPU. A thread writes
            # the copy to the disk, while the loop goes on.
            folder = run_dir / f"step-{step:08d}"
            writer = BackgroundWriter(folder, {**values, "step": step}, args.keep_checkpoints)
            saving = dcp.async_save(
                checkpoint_tensors(model, optimizer),
                storage_writer=writer,
                process_group=saving_group,
                async_stager=stager,
            )
        if stopping:
            break

        # Evaluate on text that the model was not trained on.
        if args.eval_freq and step % args.eval_freq == 0 and not is_last_step:
            results = evaluate(forward, eval_data, args.batch_size, device, loss_fn, data_group)
            log.step(step, results)
        log.lap("outside")  # what is outside of a step does not count for tokens per second

    if saving:
        saving.result()  # an error of the thread is raised here
    if stopping:
        log.close()
        say(f"stopped by SIGTERM after step {step}")
        return True
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the last checkpoint is saved
    set_timeout(timeout, dist.group.WORLD)  # rank 0 will write the model

    # Evaluate the trained model, and show what it writes. Then export it for `from_pretrained`.
    # Each token gathers all parameters again, so the sample is shorter than in stages 01 and 02.
    results = evaluate(forward, eval_data, args.batch_size, device, loss_fn, data_group)
    prompt, text = sample(forward, eval_data[0], 64, tokenizer, device)
    log.step(log.last_step, results)
    say(f"prompt, from text that the model was not trained on: {prompt}")
    say(f"what the model writes after it: {text}")
    if run_dir:
        save_final_model(run_dir, model, tokenizer, export_dtype)
    log.close()


def newest_metrics(run_dir):
    """The newest value of each metric in the metrics.jsonl of a run, and its last step."""
    path = run_dir / "metrics.jsonl"
    newest = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.endswith("}"):  # a kill may cut the last line
            newest.update(json.loads(line))
    return newest


class BackgroundWriter(dcp.FileSystemWriter):
    """Writes a checkpoint in DCP's thread, and gives it its name when it is complete."""

    def __init__(self, folder, values, keep):
        self.folder = folder
        self.values = values
        self.keep = keep
        # With copy_ahead=0 the thread uses no GPU. It would be GPU 0, on every rank.
        super().__init__(folder.with_suffix(".tmp"), per_thread_copy_ahead=0)

    def finish(self, metadata, results):
        """DCP calls this on rank 0, when all ranks have written their files."""
        super().finish(metadata, results)
        complete_checkpoint(self.folder, self.values, self.keep)


class ReplicaAverage:
    """Averages gradients over the replicas of the model: a hook for FSDP.

    `mode` says what the replicas send:
    - none: all values in fp32,
    - dct: the lower half of the frequencies of each chunk of values, in fp32,
    - int8: all values, rounded to 8 bits."""

    def __init__(self, group, mode, device):
        self.group = group
        self.mode = mode
        self.basis = low_frequencies().to(device)
        self.is_last = True  # whether the micro-batch is the last one of its step
        self.sums = {}  # the gradients of the micro-batches before, by module
        self.bytes_sent = {}  # in a step, by module

    def __call__(self, module, gradient):
        """Adds the gradients of earlier micro-batches. In the last one, averages over the replicas.

        `gradient`, (n,) fp32, holds this rank's shards of all gradients of a module. It is changed
        in place, and `sums` may keep it: FSDP keeps no reference to it, but makes each `.grad` a
        view of it. (If parameters were not fp32 as well, each would be a copy.)"""
        # The gradient was made in another CUDA stream, which reuses its memory once Python has no
        # reference to it. This delays that until the hook's stream has done what it has to do.
        if gradient.is_cuda:
            gradient.record_stream(torch.cuda.current_stream())

        if module in self.sums:
            gradient += self.sums.pop(module)
        if not self.is_last:
            self.sums[module] = gradient
            return

        if self.mode == "none":
            num_bytes = gradient.nbytes
            dist.all_reduce(gradient, group=self.group)
            gradient /= self.group.size()
        elif self.mode == "dct":
            num_bytes = self.average_spectrum(gradient)
        else:
            num_bytes = self.average_int8(gradient)

        # An average has two phases, a reduce-scatter or all-to-all, and an all-gather. With R
        # replicas a rank sends (R - 1) / R of the bytes in each of them.
        replicas = self.group.size()
        self.bytes_sent[module] = 2 * (replicas - 1) / replicas * num_bytes

    def average_spectrum(self, gradient):
        """Averages the lower half of the spectrum. The upper half becomes 0. Returns its bytes.

        A discrete cosine transform (DCT) writes each chunk as a sum of cosines: its spectrum. The
        transform is linear, so the mean of spectra is the spectrum of the mean."""
        chunks = pad(gradient, CHUNK_LENGTH).view(-1, CHUNK_LENGTH)
        spectrum = chunks @ self.basis.T
        dist.all_reduce(spectrum, group=self.group)
        chunks = spectrum / self.group.size() @ self.basis
        gradient.copy_(chunks.flatten()[: len(gradient)])
        return spectrum.nbytes

    def average_int8(self, gradient):
        """Averages values that are sent as integers from -127 to 127. Returns their bytes.

        An all-reduce would add up the integers, and they would overflow. So each rank receives one
        part of the chunks from all replicas, averages it in fp32, and sends the mean to all."""
        replicas = self.group.size()
        integers, scales = to_int8(pad(gradient, CHUNK_LENGTH * replicas).view(-1, CHUNK_LENGTH))

        parts, part_scales = torch.empty_like(integers), torch.empty_like(scales)
        dist.all_to_all_single(parts, integers, group=self.group)
        dist.all_to_all_single(part_scales, scales, group=self.group)
        mean = (parts * part_scales).view(replicas, -1, CHUNK_LENGTH).mean(0)

        mean, mean_scales = to_int8(mean)
        # Before PyTorch 2.13, all_gather_single was called all_gather_into_tensor.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        all_gather(integers, mean, group=self.group)
        all_gather(scales, mean_scales, group=self.group)
        gradient.copy_((integers * scales).flatten()[: len(gradient)])
        return integers.nbytes + scales.nbytes


def pad(values, multiple):
    """`values`, (n,), followed by zeros up to a multiple of a number."""
    return F.pad(values, (0, -len(values) % multiple))


def low_frequencies():
    """The first half of the orthonormal DCT-II matrix, (CHUNK_LENGTH / 2, CHUNK_LENGTH) fp32.

    Row k is a cosine of k half-waves, and has norm 1. Multiplying by its transpose decodes."""
    n = torch.arange(CHUNK_LENGTH, dtype=torch.float64)
    k = n[: CHUNK_LENGTH // 2, None]
    basis = (2 / CHUNK_LENGTH) ** 0.5 * torch.cos(torch.pi / CHUNK_LENGTH * (n + 0.5) * k)
    basis[0] /= 2**0.5
    return basis.float()


def to_int8(chunks):
    """Chunks of values, (n, CHUNK_LENGTH) fp32, as integers, and the scale of each, (n, 1) fp32.

    A value is its integer times the scale. The largest one of a chunk, by its magnitude, becomes
    127 or -127. If a value is not finite, the scale is not either."""
    scales = chunks.abs().amax(dim=1, keepdim=True) / 127
    scales.clamp_(min=1e-37)  # zeros would be 0 / 0
    return (chunks / scales).round().to(torch.int8), scales


class Streams:
    """The training data: endless streams of sequences, one for each sequence of a global batch.

    The documents are dealt to the streams, whatever the number of ranks, and a rank reads the
    streams whose sequences it trains on. So the sequences do not depend on the number of ranks. A
    stream that has read its last document begins again with its first. Nothing is shuffled.

    The position of a stream is a list [epoch, state, used]. `state` is that of the iterator of
    `datasets` before the document that the stream is in, None at the first one. `used` counts the
    tokens of this document that are in sequences already. A checkpoint has all positions."""

    def __init__(self, documents, tokenizer, flags, vocab_size, positions):
        self.documents = documents
        self.tokenizer = tokenizer
        self.flags = flags
        self.vocab_size = vocab_size
        self.count = flags["global_batch_size"]

        own = range(self.count)[dist.get_rank() :: dist.get_world_size()]
        self.positions = {s: positions[s] if positions else [0, None, 0] for s in own}
        self.sequences = {s: self.cut(s) for s in own}
        # A stream reads up to its position here: in a step that could exceed --timeout.
        self.ahead = {s: next(self.sequences[s]) for s in own}

    def next_batch(self):
        """Goes on to the next global batch. Returns the indices of its sequences."""
        self.rows = {}
        for stream, sequences in self.sequences.items():
            tokens, self.positions[stream] = self.ahead[stream]
            self.ahead[stream] = next(sequences)
            if max(tokens) >= self.vocab_size:
                fail(f"--dataset-name: a text has token {max(tokens)}, which the model lacks")
            self.rows[stream] = np.array(tokens)
        return range(self.count)

    def __getitem__(self, indices):
        """Sequences of the global batch, (B, T). One that `share_of_rank` repeats is 0."""
        zeros = np.zeros(self.flags["seq_length"], dtype=np.int64)
        rows = np.stack([self.rows.get(index, zeros) for index in indices])
        return {"input_ids": torch.from_numpy(rows)}

    def epoch(self):
        """The number of epochs that every stream of this rank has finished, 0 without a stream."""
        return min((epoch for epoch, _, _ in self.positions.values()), default=0)

    def all_positions(self, group):
        """The positions of all streams, of which each rank knows its own. All ranks call this."""
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, self.positions, group)
        return [of_ranks[s % len(of_ranks)][s] for s in range(self.count)]

    def documents_of(self, stream):
        """The documents of a stream.

        The files are divided into parts, one for each stream. If there are fewer files, several
        streams share a part: of two, for example, each takes every second document."""
        num_parts = max(n for n in range(1, self.documents.num_shards + 1) if self.count % n == 0)
        turn, part = divmod(stream, num_parts)
        num_turns = self.count // num_parts
        documents = self.documents.shard(num_parts, part)
        return documents.filter(lambda _, i: i % num_turns == turn, with_indices=True)

    def cut(self, stream):
        """Yields the sequences of a stream from its position on, and the position after each."""
        epoch, state, used = self.positions[stream]
        column, seq_length = self.flags["text_column"], self.flags["seq_length"]
        tokens = []  # those that do not fill a sequence yet
        while True:
            num_tokens = 0  # in all documents of the stream
            documents = self.documents_of(stream)
            if state:
                documents.load_state_dict(state)
            for document in documents:
                # A text of spaces has no tokens, for some tokenizers.
                new_tokens = next(tokenize([document[column]], self.tokenizer), [])
                num_tokens += len(new_tokens)
                tokens += new_tokens[used:]
                for end in range(seq_length, len(tokens) + 1, seq_length):
                    used = len(new_tokens) - (len(tokens) - end)  # those left are of this document
                    yield tokens[end - seq_length : end], [epoch, state, used]
                tokens = tokens[len(tokens) // seq_length * seq_length :]
                state, used = documents.state_dict(), 0

            if num_tokens == 0:
                fail(f"--global-batch-size {self.count}: as many streams need more documents")
            epoch, state = epoch + 1, None  # the stream begins again


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
def evaluate(forward, data, batch_size, device, loss_fn, group):
    """Mean loss over the targets of `data` in nats, and the perplexity, as metrics.

    There is no model.eval(): dropout is 0 in training too."""
    total = torch.zeros((), device=device)
    num_targets = torch.zeros((), dtype=torch.int64, device=device)
    indices = range(len(data))
    global_batch_size = batch_size * dist.get_world_size(group)
    for start in range(0, len(data), global_batch_size):
        batch = indices[start : start + global_batch_size]
        [(input_ids, targets)], count = make_micro_batches(data, batch, batch_size, device, group)
        total += loss_fn(forward(input_ids), targets)
        num_targets += count
    dist.all_reduce(total, group=group)
    dist.all_reduce(num_targets, group=group)
    loss = (total / num_targets).item()  # NaN if there is no target
    return {"eval/loss": loss, "eval/perplexity": float(np.exp(loss))}


@torch.no_grad()
def sample(forward, row, num_tokens, tokenizer, device):
    """Returns a prompt, the beginning of a row of data, and what the model writes after it.

    The prompt ends where an answer begins or, if all of the row is text, after 32 tokens."""
    is_target = row.get("labels", row["input_ids"]) != -100
    answers = (is_target[1:] & ~is_target[:-1]).nonzero() + 1  # where they begin
    start = answers[0].item() if len(answers) else min(32, len(is_target) // 2)
    tokens = row["input_ids"][None, : start + num_tokens].to(device, copy=True)
    tokens[:, start:] = 0

    generator = torch.Generator().manual_seed(0)
    for i in range(start, tokens.shape[1]):
        # Tokens that are not written yet are 0. Attention is causal: no earlier token reads them.
        logits = forward(tokens)[0, i - 1]
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
    """Returns the documents to train on, sequences to evaluate on, and their length.

    To evaluate on: --eval-files, the split validation or test, or about every 20th document."""
    name, path = args.dataset_name, Path(args.dataset_name)
    longest = getattr(config, "max_position_embeddings", sys.maxsize)
    seq_length = args.seq_length or min(1024, longest, tokenizer.model_max_length)
    eval_files = find_files(args.eval_files) if args.eval_files else []
    if name == "python-docs":
        datasets.disable_progress_bars()  # this takes only a second
        # Each paragraph is a document: the texts are few, and some are very long.
        rows = [{"text": part} for text in python_docs() for part in text.split("\n\n")]
        splits = {"train": datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=8)}
    elif files := [file for file in find_files(name) if file not in eval_files]:
        words = r"(?i)(?<![a-z])(valid\w*|val|eval\w*|dev|test|testing)(?![a-z])"
        if found := [file for file in files if re.search(words, "/".join(Path(file).parts[-2:]))]:
            say(f"trained on, without --eval-files for them: {', '.join(found):.300}")
        options = {"files": files, "column": args.text_column}
        splits = {"train": datasets.IterableDataset.from_generator(read_files, gen_kwargs=options)}
    elif path.exists():
        fail(f"--dataset-name {name}: has no .jsonl, .txt or .parquet, run prepare.py and stage 05")
    else:
        splits = datasets.load_dataset(name, args.dataset_subset, streaming=True)

    columns = next(iter(splits["train"]), {})
    if args.text_column not in columns:
        choice = f"choose a column of texts with --text-column, of {', '.join(columns)}"
        fail(f"--dataset-name {name}: {choice}, or run prepare.py on it, for chats for example")
    if len(columns) > 1:
        say(f"training on the column {args.text_column} of {', '.join(columns)}")
    if not 2 <= seq_length <= longest:
        fail(f"--seq-length {seq_length}: {args.model_name} takes from 2 to {longest} tokens")

    held_out = next((split for split in ("validation", "test") if split in splits), None)
    documents = splits["train"].filter(lambda row: row.get(args.text_column))  # no empty texts
    if args.eval_files:
        eval_documents = read_files(eval_files, args.text_column)
    elif held_out:
        eval_documents = splits[held_out]
    else:
        column = args.text_column  # the same text is always held out, wherever it is
        eval_documents = documents.filter(lambda row: zlib.crc32(row[column].encode()) % 20 == 0)
        documents = documents.filter(lambda row: zlib.crc32(row[column].encode()) % 20 > 0)
    texts = (row.get(args.text_column) for row in eval_documents)
    texts = [*itertools.islice(filter(None, texts), 256)]
    eval_documents = datasets.Dataset.from_dict({args.text_column: texts})
    return documents, pack(eval_documents, args.text_column, tokenizer, seq_length), seq_length


def python_docs():
    """The texts of the language reference that comes with Python.

    Some contain others. A paragraph is used once, so that none is both trained on and held out."""
    seen, texts = set(), []
    for text in topics.values():
        paragraphs = dict.fromkeys(text.split("\n\n"))  # each once, in their order
        texts.append("\n\n".join(part for part in paragraphs if part not in seen))
        seen.update(paragraphs)
    return texts


def find_files(pattern):
    """The data files that the name of a file, a folder or a glob stands for."""
    pattern = f"{pattern}/**" if Path(pattern).is_dir() else pattern
    found = [pattern] if Path(pattern).is_file() else glob.glob(pattern, recursive=True)
    files = sorted(os.path.abspath(file) for file in found if Path(file).is_file())
    endings = {Path(file.removesuffix(".gz")).suffix for file in files}
    if len(endings) > 1 or not endings <= {".jsonl", ".json", ".txt", ".parquet"}:
        choice = "choose files of one format with a glob, such as 'web/*.jsonl'"
        fail(f"{pattern}: has {', '.join(sorted(endings))}; {choice}, or run prepare.py on it")
    return files


def read_files(files, column):
    """Yields the documents of files: rows of .parquet, lines of .json(l), paragraphs of .txt.

    `datasets` has such readers, but they guess the types of columns. There a date would not stay
    the text that it is, and a file with another column than the first one would end the run."""
    for file in files:
        if file.endswith(".parquet"):
            parquet = pq.ParquetFile(file)
            columns = [column] if column in parquet.schema_arrow.names else None  # None: all
            for batch in parquet.iter_batches(batch_size=1000, columns=columns):
                yield from batch.to_pylist()
            continue

        open_file = gzip.open if file.endswith(".gz") else open
        with open_file(file, "rt", encoding="utf-8-sig") as lines:
            if file.removesuffix(".gz").endswith((".json", ".jsonl")):
                try:
                    yield from ({**json.loads(line)} for line in lines if not line.isspace())
                except (TypeError, ValueError) as error:
                    fail(f"--dataset-name {file}: one of its lines cannot be read: {error}")
                continue
            for is_empty, paragraph in itertools.groupby(lines, str.isspace):
                if not is_empty:
                    yield {column: "".join(paragraph).rstrip("\n")}


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


def check_data(args, config, documents, eval_data, seq_length):
    """Ends the run if it cannot train on these data. Returns what identifies the experiment.

    This dict is saved: a run that is resumed must have the same model and data, whatever their
    names. So it holds the config and a checksum of the tokens."""
    if len(eval_data) == 0:
        fail(f"--seq-length {seq_length}: there are too few documents to evaluate on")

    crc = documents.num_shards  # of what is trained on, which is not read yet
    for rows in eval_data.with_format("numpy").iter(batch_size=1000):
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
    add("--seed", type=int, default=0, help="of random weights")
    add("--device", choices=("cuda", "cpu"), default="cuda" if on_gpu else "cpu", help="to run on")
    add("--dtype", choices=tuple(DTYPES), default=dtype, help="of the computation")
    add("--timeout", type=int, default=600, help="seconds until a waiting collective fails")
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
    data_help = "python-docs, a hub id, or a file, folder or glob of .jsonl, .txt or .parquet"
    add("-d", "--dataset-name", default="python-docs", help=data_help)
    add("--dataset-subset", help="the configuration of a dataset on the hub")
    add("--text-column", default="text", help="train on this column of texts")
    length_help = "tokens of a sequence, None: those of prepared rows, 1024, or the model's limit"
    add("-s", "--seq-length", type=int, help=length_help)
    add("-b", "--batch-size", type=int, default=4, help="sequences of a micro-batch")
    add("--global-batch-size", type=int, default=8, help="sequences of an optimizer step")
    add("--eval-freq", type=int, help="steps between evaluations, None: only at the end")
    add("--eval-files", help="evaluate on these, a file, folder or glob, and do not train on them")
    add("--eval-sequences", type=int, default=256, help="how many to evaluate at most")

    add = parser.add_argument_group("optimization", f"Pretrained: {PRETRAINED}").add_argument
    add("--max-steps", type=int, default=600, help="end the run here")
    add("--lr", type=float, help="learning rate after the warm-up")
    add("--lr-scheduler", choices=("cosine", "linear", "constant"), default="cosine", help="decay")
    add("--lr-cycles", type=int, default=1, help="how many times the rate falls")
    add("--warmup-steps", type=int, help="None: a tenth of the run, at most 100")
    add("--weight-decay", type=float, help="of matrices")
    add("--max-grad-norm", type=float, default=1.0, help="clip gradients to this norm")

    add = parser.add_argument_group("replicas").add_argument
    per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    # A machine is one replica: its processes may have no memory for a model each.
    add("--shard-size", type=int, default=per_machine, help="processes of a replica")
    modes = ("none", "dct", "int8")
    add("--compression", choices=modes, default="none", help="of gradients between replicas")

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
    stopped = main(parse_args())
    dist.barrier()  # rank 0 writes the model, and may still send to Comet
    # A process may abort if it exits while threads of Gloo are still busy, so leave them some time.
    time.sleep(0.2)
    dist.destroy_process_group()
    if stopped:
        sys.exit(1)  # with 0, torchrun would conclude that the training is finished

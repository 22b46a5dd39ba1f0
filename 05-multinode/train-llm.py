"""Rung 05: machines may come and go at any time; documents may stream. run.sh runs on each of them.

alias run="NPROC_PER_NODE=2 bash run.sh --shard-size 1"
run
run -e notes -d notes.txt --max-steps 200
run -e alpaca -m meta-llama/Llama-3.2-1B -d tatsu-lab/alpaca --compile
"""

import argparse
import gc
import os
import shlex
import signal
import sys
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from pydoc_data.topics import topics

# First on the path: with two clones on a machine, each script imports the module of its own.
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import datasets
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from filelock import FileLock
from logs_and_checkpoints import MEMORY, WORLD_SIZE, RunLog, describe, fail, memory_gb, say
from logs_and_checkpoints import checkpoints, load_checkpoint, save_final_model
from logs_and_checkpoints import gathered, tensors_of, write_checkpoint
from tokenizers.pre_tokenizers import ByteLevel
from torch.distributed import fsdp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.checkpoint import checkpoint

transformers.logging.set_verbosity_error()
DEFINING = ("model", "from_scratch", "data", "streaming", "seq_length", "seed", "global_batch_size")
ZERO_OK = {"seed", "warmup_steps", "weight_decay", "eval_freq"}
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
SCHEDULERS = "linear cosine cosine_with_restarts polynomial constant constant_with_warmup"


@record
def main(args, run_dir, flash):
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[args.dtype]

    # Gradients travel by NCCL on GPUs; what is on a CPU, by gloo.
    # A peer that dies silently is given up after this long: then the others meet anew.
    patience = timedelta(seconds=args.timeout)
    local_rank = int(os.environ["LOCAL_RANK"])
    if device.type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, timeout=patience)
    else:
        dist.init_process_group("gloo", timeout=patience)

    # Data: sequences of one length. The seed and the global batch decide which step reads which.
    config, tokenizer, weights = load_config(args.model_name, args.from_scratch)
    longest = getattr(config, "max_position_embeddings", sys.maxsize)
    args.seq_length = args.seq_length or min(1024, longest)
    if not 2 <= args.seq_length <= longest:
        fail(f"--seq-length {args.seq_length}: {args.model_name} takes from 2 to {longest} tokens")
    streams = args.data_streams, args.global_batch_size, args.max_steps, args.data_held_out
    data = args.dataset_name, args.dataset_subset, tokenizer, args.seq_length
    train, held_out = load_data(*data, streams if args.streaming else None)
    # A node may tokenise for hours longer than another.
    dist.barrier(dist.new_group(timeout=timedelta(hours=12), backend="gloo"))
    held_out = held_out.select(range(min(len(held_out), args.eval_sequences)))
    steps_per_epoch = len(train) // args.global_batch_size
    sizes = f"{len(train)} sequences of {args.seq_length} tokens and {len(held_out)} held out"
    if steps_per_epoch == 0 or len(held_out) == 0:
        fail(f"--global-batch-size {args.global_batch_size}: {args.dataset_name} has only {sizes}")
    total_steps = min(args.num_epochs * steps_per_epoch, args.max_steps or sys.maxsize)
    say(f"{args.dataset_name}: {sizes}, {total_steps} steps")
    count = int(np.ceil(args.global_batch_size / (args.batch_size * WORLD_SIZE)))
    cut = f"{WORLD_SIZE} rank(s) × {count} micro-batch(es) of at most {args.batch_size}"
    say(f"{args.global_batch_size} sequences per step = {cut}")

    # Model: its parameters are fp32 whatever the dtype. In bf16 most small steps round to nothing.
    # Rank 0 alone holds all of it, on its CPU. The others, and what is to be sharded, hold shapes.
    full_model = load_model(config, weights, args.attn, args.seed) if dist.get_rank() == 0 else None
    with torch.device("meta"):
        model = load_model(config, None, args.attn, args.seed)
    # FlashAttention-2 if it is installed and the model has it, else PyTorch's own attention.
    if flash and args.attn == "auto" and model._supports_flash_attn:
        model.set_attn_implementation("flash_attention_2")
    facts = describe(model, args.seq_length, device)
    say(f"{facts['parameters']:,} parameters, {facts['attention']}, {args.dtype}, {device}")
    blocks = [m for m in model.modules() if type(m).__name__ in model._no_split_modules]
    for block in blocks if args.compile else []:
        block.forward = torch.compile(block.forward)
    for block in blocks if args.activation_checkpointing else []:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    # Mixed precision: parameters are gathered in `dtype`, gradients are averaged in fp32.
    policy = fsdp.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    offload = fsdp.CPUOffloadPolicy() if args.cpu_offload else fsdp.OffloadPolicy()
    # Replicas of the model, each in shards. FSDP sees one replica: the mean over them is ours.
    shard_size = args.shard_size or int(os.environ["LOCAL_WORLD_SIZE"])
    shape = (WORLD_SIZE // shard_size, shard_size)
    grid = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    mesh, replicas = grid["shard"], grid.get_group("replicate")
    for axis in grid.mesh_dim_names:  # else they wait for 10 minutes, or 30
        dist.distributed_c10d._set_pg_timeout(patience, grid.get_group(axis))
    mode = args.compression if shape[0] > 1 else "none"
    alone = "" if shape[0] > 1 else ": nothing to compress, --shard-size 1 makes each process one"
    say(f"{shape[0]} replica(s) of {shard_size} shard(s), compression {mode}{alone}")
    for module in [*blocks, model]:
        fsdp.fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
    if args.keep_gathered:
        model.set_reshard_after_forward(False)
    model.to_empty(device="cpu" if args.cpu_offload else device)
    # The true weights, dealt out shard by shard: what a reset_parameters() of one's own makes up is
    # neither the initialisation of this architecture nor what was pretrained.
    state = full_model.state_dict() if full_model else {}
    deal = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=deal)
    # Buffers that no state dict holds, such as the frequencies of rotary embeddings.
    for name, buffer in list(model.named_buffers()):
        buffer = full_model.get_buffer(name) if full_model else buffer
        buffer = buffer.to(device)
        dist.broadcast(buffer, src=0)
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, buffer)
    del full_model, state

    # Optimizer. The learning rate is a function of the step, so that a resume needs only the step.
    args.lr = args.lr or (2e-5 if weights else 1e-3)
    groups = [{"params": [p for p in model.parameters() if p.ndim >= 2]}]
    groups += [{"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, args.lr, weight_decay=args.weight_decay, fused=True)
    warmup = min(100, total_steps // 10) if args.warmup_steps is None else args.warmup_steps
    schedule = transformers.get_scheduler(args.lr_scheduler, optimizer, warmup, total_steps)
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "fp16")

    # Resume, then open the log at the step where the run stands.
    state = load_checkpoint(run_dir, model, optimizer) if run_dir else {"step": 0}
    start = state["step"]
    if start >= total_steps and (run_dir / "final_model" / f"step-{start:08d}").exists():
        return say(f"{run_dir} is finished at step {start}: raise --max-steps or --num-epochs")
    if state.get("total_steps", total_steps) != total_steps:
        say(f"learning rate: scheduled over {total_steps} steps, before {state['total_steps']}")
    scaler.load_state_dict(state.get("scaler") or scaler.state_dict())
    log = RunLog(run_dir, start, total_steps, state.get("comet_key"), vars(args), facts)
    if args.streaming:
        train.open(*state.get("streams") or (0, 0, None))
    # torchrun sends SIGTERM when machines come or go, Slurm when time is nearly up: all ranks save
    # after the same step. Files are written by a thread, with collectives of its own.
    stop, saving, stall, order, stager = [], None, 0.0, [], None
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    writer, beside = ThreadPoolExecutor(1), dist.new_group(timeout=patience, backend="gloo")

    for step in range(start + 1, total_steps + 1):
        epoch, window = divmod(step - 1, steps_per_epoch)
        if not args.streaming and (window == 0 or step == start + 1):
            order = np.random.default_rng((args.seed, epoch)).permutation(len(train))
        indices = order[window * args.global_batch_size : (window + 1) * args.global_batch_size]
        if args.streaming:
            indices = train.draw()
        micro_batches, num_targets = batches(train, indices, args.batch_size, device)
        num_targets = torch.tensor([num_targets, len(stop)])  # whether to stop is agreed by the way
        dist.all_reduce(num_targets)
        num_targets, stops = num_targets.unbind()
        num_targets.clamp_(min=1)  # a step without any has no loss
        # FSDP calls the hook when gradients synchronise, on a GPU in a stream beside the backward.
        # Every module needs one: that of the root is not called for the blocks.
        traffic = {"sent": 0.0, "dense": 0.0}
        # Where a chunk's values travel, in randk and dct: in the same places on all replicas, or no
        # mean could be made, in others at each step, or parameters would starve (arXiv:1610.05492).
        places = torch.randperm(args.chunk, generator=torch.Generator().manual_seed(step))
        places = places[: max(1, round(args.keep * args.chunk))].to(device, non_blocking=True)
        hook = partial(average, group=replicas, mode=mode, wire=args.wire_dtype, chunk=args.chunk)
        hook = partial(hook, places=places, lap=log.lap, traffic=traffic)
        for module in [*blocks, model]:
            module.set_all_reduce_hook(hook)
        optimizer.zero_grad()
        step_loss = torch.zeros((), device=device)
        log.lap("data")
        for input_ids, targets in micro_batches:
            # Gradients are averaged once per step, in the backward of its last micro-batch.
            final = targets is micro_batches[-1][1]
            model.set_requires_gradient_sync(final)
            # Parameters that stay gathered behind a forward stay so until the step's last backward.
            model.set_reshard_after_backward(final or not args.keep_gathered)
            loss = loss_sum(model, input_ids, targets)
            step_loss += loss.detach()
            log.lap("forward")
            # The mean over the targets of the global batch: a mean of means weighs them unequally.
            # Gradients are averaged over the ranks: times WORLD_SIZE, that is their sum.
            scaler.scale(loss * WORLD_SIZE / num_targets).backward()
            log.lap("backward")
        scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * schedule.lr_lambdas[0](step - 1)
        scaler.step(optimizer)
        scaler.update()
        log.lap("update")

        metrics = {}
        if step == 1 or step % args.log_freq == 0 or step == total_steps:
            memory = memory_gb(model, optimizer, device)
            dist.all_reduce(step_loss)
            dist.all_reduce(memory, dist.ReduceOp.MAX)
            grad_norm = grad_norm.full_tensor()
            metrics = {"loss": step_loss.item() / num_targets.item(), "grad_norm": grad_norm.item()}
            metrics |= {"learning_rate": group["lr"], "epoch": step / steps_per_epoch}
            metrics |= log.times() | dict(zip(MEMORY, memory.tolist(), strict=True))
            sent, dense = traffic["sent"], traffic["dense"]
            encode_ms = metrics.pop("time/encode_ms", 0.0)
            metrics |= {"comm/bytes_per_step": sent, "comm/encode_ms": encode_ms}
            metrics["comm/compression_ratio"] = dense / sent if sent else 1.0
            metrics |= {f"elastic/{name}": number for name, number in log.elastic.items()}
            metrics |= {"epoch": train.epoch} if args.streaming else {}
        if step == total_steps or (args.eval_freq and step % args.eval_freq == 0):
            metrics |= evaluate(model, held_out, args.batch_size, device)
            log.lap("outside")
        if step == total_steps and mode != "none":
            # At speed v dense takes dense / v, and this sent / v + encode_ms. On a GPU a backward,
            # which takes twice its forward, hides that much of the sending.
            hidden_ms = 2 * metrics["time/forward_ms"] / count if device.type == "cuda" else 0.0
            speed = min((dense - sent) / encode_ms, dense / (hidden_ms + encode_ms)) * 0.008
            say(f"{mode} beats none on links of less than {max(0, speed):,.0f} Mbit/s per rank")
        log.step(step, metrics)
        log.lap("log")
        begin, last = time.perf_counter(), stops > 0 or step == total_steps
        due = run_dir and (last or step % args.ckpt_freq == 0)
        if saving and (due or saving.done()):
            log.saved(saving.result() | {"checkpoint/stall_ms": stall})
            saving = None
        if due:
            plain = {"flags": vars(args), "total_steps": total_steps, "comet_key": log.comet_key}
            plain["scaler"] = scaler.state_dict()
            plain["streams"] = train.state() if args.streaming else None
            if stager is None or torch.__version__ < "2.13":  # before, each can be used once
                stager = DefaultStager(StagingOptions(device.type == "cuda", False, False, False))
            copy = stager.stage(tensors_of(model, optimizer))
            save = partial(write_checkpoint, run_dir, step, copy, plain, args.keep_checkpoints)
            saving = writer.submit(save, beside)
            stall = 1000 * (time.perf_counter() - begin)
            log.lap("outside")
        if last and saving:
            saving.result()
        if last and step < total_steps:
            log.close()
            say(f"stopped by SIGTERM after step {step}")
            sys.exit(1)  # torchrun takes 0 for the end of the training
    if run_dir:
        save_final_model(run_dir, max(start, total_steps), model, config, tokenizer)
    log.close()
    tokens = sample(model, held_out[-1]["input_ids"][:256], 32, device)
    say(f"{tokenizer.decode(tokens[:32])} [the model goes on] {tokenizer.decode(tokens[32:])}")


def load_config(name, from_scratch):
    """Returns the config, the tokenizer, and what to load weights from: None to start from new."""
    # Bytes as tokens need no file: 256 of them and an end of text.
    vocabulary = enumerate(["<|endoftext|>", *sorted(ByteLevel.alphabet())])
    tokenizer = transformers.GPT2Tokenizer({token: i for i, token in vocabulary}, merges=[])
    if name == "tiny":
        sizes = {"vocab_size": 384, "hidden_size": 128, "intermediate_size": 320}
        sizes |= {"num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 256}
        return transformers.LlamaConfig(**sizes, bos_token_id=0, eos_token_id=0), tokenizer, None
    try:
        files = [file.name for file in Path(name).glob("*")]
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        config = config.get_text_config()
        if not files or any("token" in file or "vocab" in file for file in files):
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        else:
            say(f"{name} has no tokenizer: its tokens are bytes here")
    except Exception as error:  # libraries raise all kinds for a file that is not as it should be
        fail(f"--model-name {name}: {type(error).__name__}: {error}")
    if len(tokenizer) > config.vocab_size:
        fail(f"--model-name {name}: {len(tokenizer)} tokens, a vocabulary of {config.vocab_size}")
    # Dropout draws random numbers, and others when the batch is cut another way.
    for key, value in vars(config).items():
        if value and ("dropout" in key or "pdrop" in key):
            setattr(config, key, 0.0)
            say(f"{key} is {value} in {name} and 0 here")
    has_weights = not files or any(x in f for f in files for x in (".safetensors", ".bin", ".pt"))
    return config, tokenizer, name if has_weights and not from_scratch else None


def load_data(name, subset, tokenizer, seq_length, sizes):
    """Returns the sequences to train on and to evaluate on: validation, test, or the last 5 %."""
    path, source = Path(name), {"path": name, "name": subset}
    try:
        if path.suffix in {".txt", ".json", ".jsonl", ".parquet"}:
            source = {"path": str(path.resolve().parent), "data_files": path.name}
        if path.suffix == ".txt" or any(path.rglob("*.txt")):
            source["sample_by"] = "document"
        # The processes of a node take turns: the first tokenises, the others find its cache.
        with FileLock(f"/tmp/train-llm-{os.getuid()}.lock"):
            if name == "python-docs":
                datasets.disable_progress_bars()
                splits = {"train": datasets.Dataset.from_dict({"text": list(topics.values())})}
            elif name == "dummy":
                tokens = np.random.default_rng(0).integers(len(tokenizer), size=(4096, seq_length))
                splits = {"train": datasets.Dataset.from_dict({"input_ids": tokens})}
            else:
                splits = datasets.load_dataset(**source, streaming=sizes is not None)
            if "train" not in splits:
                raise ValueError(f"no split is called train, there are {list(splits)}")
            if sizes:  # documents stream; the first ones are evaluated
                train = Streams(splits["train"], tokenizer, seq_length, *sizes)
                return train, train.held_out
            train = pack(splits["train"], tokenizer, seq_length)
            for split in ("validation", "test"):
                if split in splits:
                    return train, pack(splits[split], tokenizer, seq_length)
    except Exception as error:
        fail(f"--dataset-name {name}: {type(error).__name__}: {error} {error.__cause__ or ''}")
    rest = len(train) - (len(train) + 19) // 20
    return train.select(range(rest)), train.select(range(rest, len(train)))


class Streams:
    """`count` streams of documents, tokenised when they are needed, cut to sequences of `length`.
    Sequence i comes from stream i mod count, read by rank i mod batch mod world size: a share of
    the files or, where they are too few, one of every count documents. Dry ones are passed over."""

    def __init__(self, documents, tokenizer, length, count, batch, steps, held_out):
        if isinstance(documents, datasets.Dataset):
            documents = documents.to_iterable_dataset()
        self.documents, self.length = documents, length
        self.count, self.batch, self.steps = count, batch, steps
        row = next(iter(documents), {})
        texts = [x for x in row if x == "text"] + [x for x in row if isinstance(row[x], str)]
        if not texts:
            raise ValueError(f"no column holds text, there are {list(row)}")
        self.join = partial(join_and_cut, column=texts[0], tokenizer=tokenizer, length=sys.maxsize)
        # A reader for each stream, or one for all those of a process.
        self.readers = count if documents.num_shards >= count else 1
        # The first documents are not trained on, but evaluated.
        rows, self.skip = documents.shard(self.readers, 0).take(held_out), held_out
        first = self.join({texts[0]: [row[texts[0]] for row in rows]}, rest=[], length=length)
        self.held_out = datasets.Dataset.from_dict(first).with_format("torch")

    def __len__(self):
        return self.steps * self.batch if len(self.held_out) else 0

    def open(self, epoch, turn, places):
        """Takes up the streams of this rank at their places, whichever rank had them before.
        A place: number of a document, how many tokens of it are used, its reader's state at it."""
        starts = [[0 if v % self.readers else self.skip, 0, None] for v in range(self.count)]
        self.epoch, self.turn, rank, readers = epoch, turn, dist.get_rank(), {}
        owned = [v for v in range(self.count) if v % self.batch % WORLD_SIZE == rank]
        self.places = {v: (places or starts)[v] for v in owned}
        self.queues = {v: deque() for v in owned}
        # The foremost place comes last, and so decides where a reader of several starts.
        for v in sorted(owned, key=lambda v: -self.places[v][0]):
            readers[v % self.readers] = self.read(v % self.readers, *self.places[v])
        self.cuts = {v: self.cut(v, readers[v % self.readers]) for v in owned}
        self.next = {v: next(self.cuts[v], None) for v in owned}

    def read(self, share, start, _, state):
        """Puts a document into the queue of its stream at each `next`, True until the end."""
        documents = self.documents.shard(self.readers, share)
        if state:
            documents.load_state_dict(state)
        for number, row in enumerate(documents, start if state else 0):
            # Turned by one each time: of short and long in turn, say, each stream gets both.
            stream = share if self.readers > 1 else (number + number // self.count) % self.count
            if stream in self.queues and number >= self.places[stream][0]:
                self.queues[stream].append((number, state, row))
            state = documents.state_dict()
            yield True

    def cut(self, stream, reader):
        """Yields the sequences of a stream from its place on, each with the place behind it."""
        (first, used, _), tokens = self.places[stream], []
        while self.queues[stream] or next(reader, False):
            if not self.queues[stream]:
                continue
            (number, state, row), ids = self.queues[stream].popleft(), []
            self.join({name: [value] for name, value in row.items()}, rest=ids)
            start = used if number == first else 0
            while len(tokens) + len(ids) - start >= self.length:
                end = start + self.length - len(tokens)
                yield tokens + ids[start:end], [number, end, state]
                tokens, start = [], end
            tokens += ids[start:]

    def draw(self):
        """Takes the next global batch; returns the indices that `batches` cuts, rank's by rank."""
        drawn, self.rows = [], []
        while len(drawn) < self.batch:
            live = np.array([self.next.get(v) is not None for v in range(self.count)], np.int32)
            dist.all_reduce(torch.from_numpy(live))
            turns = [v % self.count for v in range(self.turn, self.turn + self.count)]
            turns = [v for v in turns if live[v]][: self.batch - len(drawn)]
            if not turns and self.turn == 0:
                fail("--streaming: the documents do not fill one sequence beside those held out")
            if not turns:
                self.open(self.epoch + 1, 0, None)
            for v in turns:
                if v in self.next:
                    sequence, self.places[v] = self.next[v]
                    self.next[v] = next(self.cuts[v], None)
                    self.rows.append(sequence)
                drawn.append(v)
                self.turn = v + 1
        # Where a rank has fewer than others: sequences without targets.
        most = max(Counter(v % self.batch % WORLD_SIZE for v in drawn).values())
        self.rows += [[-100] * self.length] * (most - len(self.rows))
        return range(most * WORLD_SIZE)

    def __getitem__(self, indices):
        """Sequences of this rank's share, (B, T) int64, and their labels."""
        labels = torch.tensor([self.rows[i // WORLD_SIZE] for i in indices])
        return {"input_ids": labels.clamp(min=0), "labels": labels}

    def state(self):
        """What `open` takes, for JSON. Called by all ranks."""
        places = {v: place for part in gathered(self.places) for v, place in part.items()}
        return self.epoch, self.turn, [places[v] for v in range(self.count)]


def pack(data, tokenizer, seq_length):
    """Turns documents into sequences. Rows with input_ids (and labels) are taken as they are."""
    if "input_ids" in data.column_names:
        length = len(data[0]["input_ids"])
        if length != seq_length:
            raise ValueError(f"its input_ids have {length} tokens, --seq-length is {seq_length}")
    else:
        texts = [k for k, v in data.features.items() if getattr(v, "dtype", "").endswith("string")]
        if not texts:
            raise ValueError(f"no column holds text, there are {data.column_names}")
        how = {"column": "text" if "text" in texts else texts[0], "length": seq_length}
        how |= {"tokenizer": tokenizer, "rest": []}
        data = data.map(join_and_cut, batched=True, remove_columns=data.column_names, fn_kwargs=how)
    return data.with_format("torch", columns=sorted({"input_ids", "labels"} & {*data.column_names}))


def join_and_cut(documents, column, tokenizer, length, rest):
    """Tokens of documents, EOS behind each, cut to `length`; `rest` waits for more documents."""
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for ids in tokenizer([text or "" for text in documents[column]])["input_ids"]:
        rest += ids if ids[-1:] == eos else ids + eos
    end = len(rest) // length * length
    sequences = [rest[i : i + length] for i in range(0, end, length)]
    del rest[:end]
    return {"input_ids": sequences}


def load_model(config, weights, attn, seed):
    """The model on the CPU, in fp32, with the weights of a folder or hub id, or with new ones."""
    how = {"attn_implementation": None if attn == "auto" else attn, "dtype": torch.float32}
    torch.manual_seed(seed)
    try:
        if weights is None:
            return transformers.AutoModelForCausalLM.from_config(config, **how)
        how |= {"config": config, "output_loading_info": True, "trust_remote_code": False}
        model, info = transformers.AutoModelForCausalLM.from_pretrained(weights, **how)
    except Exception as error:
        fail(f"--model-name {weights or config.name_or_path}: {type(error).__name__}: {error}")
    if info["missing_keys"]:
        fail(f"--model-name {weights}: it lacks weights for {sorted(info['missing_keys'])[:3]}")
    return model.train()


def average(gradient, group, mode, wire, chunk, places, lap, traffic):
    """Puts the mean over the replicas in the place of `gradient`, (n,) fp32: a module's shard.
    With randk what stands at `places` of each `chunk` travels, with dct at those of its spectrum.
    One spectrum of all would be slow, and mean no more: parameters lie there in any order."""
    lap("backward")
    if gradient.is_cuda:  # FSDP made it in another stream, and may let go of it before this is done
        gradient.record_stream(torch.cuda.current_stream())
    traffic["dense"] += 2 * (group.size() - 1) / group.size() * gradient.nbytes
    if mode == "none":
        traffic["sent"] = traffic["dense"]
        dist.all_reduce(gradient, group=group)
        return gradient.div_(group.size())
    if mode not in ("randk", "dct"):
        gradient.copy_(exchange(gradient, group, mode, lap, traffic))
        return lap("encode")
    rows = F.pad(gradient, (0, -len(gradient) % chunk)).view(-1, chunk)
    if mode == "dct":
        rows = rows @ dct_basis(chunk, gradient.device).T
    # Moved by a hash of the chunk's number: else whole columns of a matrix would travel or wait.
    places = places + (torch.arange(len(rows), device=places.device)[:, None] * 2654435761 >> 16)
    places %= chunk
    # Plus 0, or NaN if a value is not finite: one that stays here must not be hidden.
    sent = rows.gather(1, places).flatten() + 0 * gradient.sum()
    mean = exchange(sent, group, wire, lap, traffic).view_as(places)
    rows = torch.zeros_like(rows).scatter_(1, places, mean)
    if mode == "dct":
        rows = rows @ dct_basis(chunk, gradient.device)
    gradient.copy_(rows.flatten()[: len(gradient)])
    lap("encode")


@cache
def dct_basis(chunk, device):
    """The orthonormal DCT-II, (chunk, chunk) fp32, a frequency a row. Its inverse: its transpose.
    Source: Ahmed, Natarajan, Rao: Discrete Cosine Transform. IEEE Trans. Computers, 1974."""
    n = torch.arange(chunk, dtype=torch.float64)
    basis = (2 / chunk) ** 0.5 * torch.cos(torch.pi / chunk * (n + 0.5) * n[:, None])
    basis[0] /= 2**0.5
    return basis.float().to(device)


def exchange(values, group, wire, lap, traffic):
    """The mean over the group of `values`, (n,) fp32, which travel as `wire`.
    Their sums would overflow or lose bits. So a rank gets all versions of its part, and sends the
    part's fp32 mean to all: the two halves of a ring all-reduce, with as many values sent."""
    world = group.size()
    rows = to_bytes(F.pad(values, (0, -len(values) % (256 * world))), wire)
    parts = torch.empty_like(rows)
    lap("encode")
    dist.all_to_all_single(parts, rows, group=group)
    lap("travel")
    mean = to_bytes(from_bytes(parts, wire).view(world, -1).mean(0), wire)
    lap("encode")
    dist.all_gather(list(rows.chunk(world)), mean, group=group)
    lap("travel")
    traffic["sent"] += 2 * (world - 1) / world * rows.nbytes
    return from_bytes(rows, wire)[: len(values)]


def to_bytes(values, wire):
    """Rows of uint8, each 256 of `values`, fp32. Integers count in steps of an fp32 `unit` that
    stands behind them, and is not finite if one of the values is not."""
    blocks = values.view(-1, 256)
    if wire in FLOATS:
        return blocks.to(FLOATS[wire]).view(torch.uint8)
    unit = blocks.abs().amax(1, keepdim=True) / (127 if wire == "int8" else 7)
    unit.clamp_(min=torch.finfo(torch.float32).tiny)
    levels = (blocks / unit).round().to(torch.int8)
    if wire == "int4":  # two in a byte
        levels = levels[:, ::2] << 4 | levels[:, 1::2] & 15
    return torch.cat([levels.view(torch.uint8), unit.view(torch.uint8)], dim=1)


def from_bytes(rows, wire):
    """The values, (n,) fp32, of rows from `to_bytes`."""
    if wire in FLOATS:
        return rows.view(FLOATS[wire]).float().flatten()
    levels, unit = rows[:, :-4].view(torch.int8), rows[:, -4:].contiguous().view(torch.float32)
    if wire == "int4":
        levels = torch.stack([levels >> 4, levels << 4 >> 4], dim=2).flatten(1)
    return (levels * unit).flatten()


def batches(data, indices, batch_size, device):
    """Cuts this process's share of a global batch, `indices`, into micro-batches on the device.

    Returns (input_ids, targets) pairs, (B, T) int64 with -100 for no target, and the number of
    their targets, a CPU tensor. Position i predicts token i + 1."""
    # One that runs short repeats a sequence without targets: all run as many micro-batches.
    rank, world_size = dist.get_rank(), dist.get_world_size()
    short = rank >= len(indices) % world_size > 0
    indices = [*indices[rank::world_size], *indices[: int(short)]]
    micro_batches, num_targets = [], torch.tensor(0)
    for first in range(0, len(indices), batch_size):
        rows = data[indices[first : first + batch_size]]
        targets = F.pad(rows.get("labels", rows["input_ids"])[:, 1:], (0, 1), value=-100)
        if short and first + batch_size >= len(indices):
            targets[-1] = -100
        num_targets += (targets != -100).sum()
        pair = rows["input_ids"], targets
        if device.type == "cuda":  # from pinned memory a copy waits for nothing
            pair = [tensor.pin_memory().to(device, non_blocking=True) for tensor in pair]
        micro_batches.append(pair)
    return micro_batches, num_targets


def loss_sum(model, input_ids, targets):
    """The sum of the token losses in nats, a scalar on the device."""
    logits = model(input_ids=input_ids, use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


@torch.no_grad()
def evaluate(model, data, batch_size, device):
    """Loss in nats per token of `data`, and its exponential, as metrics."""
    micro_batches, num_targets = batches(data, range(len(data)), batch_size, device)
    total = sum(loss_sum(model, input_ids, targets) for input_ids, targets in micro_batches)
    model.reshard()  # no backward comes to do it
    dist.all_reduce(total)
    dist.all_reduce(num_targets)
    loss = (total.cpu().double() / num_targets).item()  # without targets not a number
    return {"eval/loss": loss, "eval/perplexity": float(np.exp(loss))}


@torch.no_grad()
def sample(model, tokens, start, device):
    """Writes tokens `start` and later of a 1-D sequence anew, drawn at temperature 0.8."""
    tokens, draw = tokens[None].clone(), torch.Generator().manual_seed(0)
    for i in range(start, tokens.shape[1]):
        # One shape throughout. What stands behind i is not seen: attention is causal.
        logits = model(input_ids=tokens.to(device), use_cache=False).logits[0, i - 1].float().cpu()
        tokens[0, i] = torch.multinomial((logits / 0.8).nan_to_num().softmax(0), 1, generator=draw)
    model.reshard()  # no backward comes to do it
    return tokens[0]


def parse_args():
    """Returns the flags, checked, the folder of a named run, and if FlashAttention-2 is usable."""
    parser = argparse.ArgumentParser(fromfile_prefix_chars="@", description=__doc__.splitlines()[0])
    parser.convert_arg_line_to_args = shlex.split
    parser.error = fail
    switch = {"action": argparse.BooleanOptionalAction, "default": False}
    add = parser.add_argument_group("run").add_argument
    add("-e", "--experiment-name", help="keep logs, checkpoints and model in SAVE_DIR/NAME; resume")
    add("--timeout", type=int, default=600, help="seconds that processes wait for one another")
    add("--save-dir", default=str(ROOT / "outputs"), help="default: outputs, beside this folder")
    add("--seed", type=int, default=0)
    add("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    add("--dtype", choices=("bf16", "fp16", "fp32"), help="default: bf16 on a GPU, fp32 on a CPU")
    add("--log-freq", type=int, default=10, help="steps between log lines")
    add("--ckpt-freq", type=int, default=500, help="steps between checkpoints")
    add("--keep-checkpoints", type=int, default=2, help="how many of the newest are kept")
    add("--comet-project-name", default="train-llm")
    add("--comet-workspace", help="default: the one of your account")
    add("--comet-offline", help="archives to upload later, no account needed", **switch)
    add = parser.add_argument_group("model and data").add_argument
    add("-m", "--model-name", default="tiny", help="tiny, a hub id, or a folder")
    add("--from-scratch", help="take the architecture only, not the weights", **switch)
    add("--attn", choices=("auto", "flash_attention_2", "sdpa", "eager"), default="auto")
    add("--activation-checkpointing", help="less memory for up to a third more compute", **switch)
    add("--cpu-offload", help="keep shards and optimizer in the memory of the CPU", **switch)
    add("--keep-gathered", help="gather parameters once a step: faster, more memory", **switch)
    add("--compile", help="torch.compile each block", **switch)
    add("-d", "--dataset-name", default="python-docs", help="or dummy, a hub id, a file, a folder")
    add("--dataset-subset", help="the configuration of a data set on the hub")
    add("--streaming", action=argparse.BooleanOptionalAction, help="tokenise while training")
    add("--data-streams", type=int, help="a multiple of the global batch, which is the default")
    add("--data-held-out", type=int, help="the first documents, to be evaluated; default: 100")
    add("-s", "--seq-length", type=int, help="default: 1024, or the model's limit if shorter")
    add("-b", "--batch-size", type=int, default=8, help="sequences of a micro-batch on a process")
    add("--global-batch-size", type=int, default=32, help="sequences of an optimizer step")
    add("--eval-freq", type=int, default=0, help="steps between evaluations; 0: at the end only")
    add("--eval-sequences", type=int, default=256, help="how many an evaluation takes at most")
    add = parser.add_argument_group("optimization").add_argument
    add("--num-epochs", type=int, default=3)
    add("--max-steps", type=int, help="ends the run if it comes before the last epoch's end")
    add("--lr", type=float, help="default: 1e-3 from scratch, 2e-5 with loaded weights")
    add("--lr-scheduler", choices=SCHEDULERS.split(), default="cosine")
    add("--warmup-steps", type=int, help="default: a tenth of the run, at most 100")
    add("--weight-decay", type=float, default=0.01, help="of matrices; vectors have none")
    add("--max-grad-norm", type=float, default=1.0)
    add = parser.add_argument_group("gradients between replicas").add_argument
    add("--shard-size", type=int, help="processes of a replica; default: those of a node")
    add("--compression", choices=("none", "bf16", "int8", "int4", "randk", "dct"), default="int8")
    add("--keep", "--dct-keep", type=float, default=0.5, help="the part that randk and dct send")
    sizes = {"choices": (64, 128, 256, 512), "default": 256}
    add("--chunk", "--dct-chunk", type=int, help="values of a spectrum, or of a draw", **sizes)
    wires = {"choices": ("fp32", "bf16", "int8", "int4"), "default": "int8"}
    add("--wire-dtype", help="how randk and dct send values", **wires)
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        fail("this rung needs torchrun: torchrun --standalone --nproc-per-node 2 train-llm.py")
    run_dir = Path(args.save_dir, args.experiment_name) if args.experiment_name else None
    stored = next((x["flags"] for _, x in checkpoints(run_dir) if x), {}) if run_dir else {}
    parser.set_defaults(**{k: stored[k] for k in vars(args) if k in stored})  # those given win
    args = parser.parse_args()
    if args.streaming:
        args.data_streams = args.data_streams or args.global_batch_size
        args.data_held_out = args.data_held_out or 100
    for key, value in ({"streaming": None} | vars(args)).items():
        flag = f"--{key.replace('_', '-')} {value}"
        if stored and key.startswith(DEFINING) and value != stored.get(key):
            fail(f"{flag}: the run in {run_dir} has {stored.get(key)}")
        if type(value) in (int, float) and not (0 < value < 2**63 or value == 0 and key in ZERO_OK):
            fail(f"{flag}: must be {'from' if key in ZERO_OK else 'above'} 0 and below 2**63")
    gpu = args.device != "cpu" and torch.cuda.is_available()
    if args.device == "cuda" and not gpu:
        fail("--device cuda: PyTorch finds no GPU here")
    if gpu and int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count():
        fail(f"--nproc-per-node: there are only {torch.cuda.device_count()} GPUs here")
    if args.cpu_offload and not gpu:
        fail("--cpu-offload: without a GPU everything is in the memory of the CPU already")
    if args.cpu_offload and args.dtype == "fp16":
        fail("--cpu-offload: not with fp16, whose gradient scale would be read while it is copied")
    if args.dtype == "fp16" and not gpu:
        fail("--dtype fp16: its gradient scaling is for a GPU, a CPU has bf16 and fp32")
    if WORLD_SIZE % (size := args.shard_size or int(os.environ["LOCAL_WORLD_SIZE"])):
        fail(f"--shard-size {size}: does not divide {WORLD_SIZE} processes")
    if args.streaming and not args.max_steps:
        fail("--streaming: needs --max-steps, nobody knows how many documents there are")
    if args.streaming and args.data_streams % args.global_batch_size:
        fail(f"--data-streams {args.data_streams}: no multiple of {args.global_batch_size}")
    if args.keep > 1:
        fail(f"--keep {args.keep}: must be above 0 and at most 1")
    args.dtype = args.dtype or ("bf16" if gpu else "fp32")
    flash = gpu and args.dtype != "fp32" and transformers.utils.is_flash_attn_2_available()
    if args.attn == "flash_attention_2" and not flash:
        fail("--attn flash_attention_2: needs a GPU, bf16 or fp16, and pip install -e '.[flash]'")
    try:
        if run_dir:
            run_dir.mkdir(parents=True, exist_ok=True)
            (run_dir / "metrics.jsonl").touch()
    except OSError as error:
        fail(f"--save-dir {args.save_dir}: {error}")
    return args, run_dir, flash


if __name__ == "__main__":
    main(*parse_args())
    # A gloo run that ends at once aborts at times (pytorch#179291). After an error this would hang.
    gc.collect()
    dist.barrier()
    time.sleep(0.2)
    dist.destroy_process_group()

"""Rung 03: sharding (FSDP2). Each process keeps a part of every parameter, gradient and moment.

Try it, train on a text of your own, fine-tune a pretrained model:

    torchrun --standalone --nproc-per-node 2 train-llm.py
    torchrun --standalone --nproc-per-node 2 train-llm.py -e notes -d notes.txt --max-steps 200
    torchrun --standalone --nproc-per-node 8 train-llm.py -e alpaca -m gpt2 -d tatsu-lab/alpaca
"""

import argparse
import gc
import math
import os
import shlex
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

# logs_and_checkpoints.py lies beside this folder. It comes first on the path: with two clones of
# this repository on a machine, each script must import the module of its own clone.
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import datasets
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from filelock import FileLock
from logs_and_checkpoints import (
    MEMORY_METRICS,
    RunLog,
    checkpoints,
    fail,
    load_checkpoint,
    memory_gb,
    save_checkpoint,
    save_final_model,
    say,
)
from tokenizers.pre_tokenizers import ByteLevel
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

transformers.logging.set_verbosity_error()

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# A run may be resumed on other hardware and in another rung, but not with other values of these:
# it would be another experiment.
EXPERIMENT_FLAGS = (
    "model_name",
    "from_scratch",
    "dataset_name",
    "dataset_subset",
    "seq_length",
    "seed",
    "global_batch_size",
)
# Dense bf16 peak in FLOP/s by a part of the device's name, from NVIDIA's data sheets.
PEAK_FLOPS = {"A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}


@record  # torchrun shows the traceback of the process that failed first
def main(args):
    run_dir = open_run_dir(args)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = DTYPES[args.dtype]

    # torchrun starts the processes. In the process group each of them has a rank, its number from
    # 0 to world_size - 1, and together they compute with tensors of all ranks (collectives). NCCL
    # is NVIDIA's library for that: it serves tensors on GPUs. Gloo serves tensors on CPUs.
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))  # each rank has its own GPU
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    world_size = dist.get_world_size()

    # Data: sequences of one length, cut from the documents.
    config, tokenizer, weights = load_config(args.model_name, args.from_scratch)
    args.seq_length = check_seq_length(args.seq_length, config, args.model_name)
    train_data, eval_data = load_data(
        args.dataset_name, args.dataset_subset, tokenizer, args.seq_length
    )
    # Each node tokenizes for itself, and one may take hours longer than another. A collective gives
    # up after 30 minutes, so all ranks wait here for the last one, with a timeout of their own.
    dist.barrier(dist.new_group(backend="gloo", timeout=timedelta(hours=12)))
    eval_data = eval_data.select(range(min(len(eval_data), args.eval_sequences)))

    # An optimizer step trains on one global batch. An epoch is one pass over the training data.
    # What does not fill a batch at its end is left out.
    steps_per_epoch = len(train_data) // args.global_batch_size
    sizes = f"{len(train_data)} sequences of {args.seq_length} tokens and {len(eval_data)} held out"
    if steps_per_epoch == 0 or len(eval_data) == 0:
        fail(f"--global-batch-size {args.global_batch_size}: {args.dataset_name} has only {sizes}")
    total_steps = min(args.num_epochs * steps_per_epoch, args.max_steps or sys.maxsize)
    say(f"{args.dataset_name}: {sizes}, {total_steps} steps")

    # A global batch is usually too large for the memory of the device. So it is split into
    # micro-batches, whose gradients are added up before the update (gradient accumulation).
    # Each rank takes its share of the global batch: more ranks do not change what is trained on.
    sequences_per_rank = math.ceil(args.global_batch_size / world_size)
    grad_accum_steps = math.ceil(sequences_per_rank / args.batch_size)
    say(
        f"{args.global_batch_size} sequences per step = "
        f"{world_size} rank(s) × "
        f"{grad_accum_steps} micro-batch(es) of at most {args.batch_size}"
    )

    # Model. Its parameters are fp32 whatever the dtype: bf16 has 8 bits of precision, and most
    # updates are too small to change a number that has so few.
    # A model that is too large for one GPU cannot be built there. So rank 0 builds all of it in the
    # memory of its CPU, and every rank builds it on the meta device, where tensors have shapes but
    # no storage. That one is sharded, and then filled.
    full_model = None
    if dist.get_rank() == 0:
        full_model = load_model(config, weights, args.attn, args.seed)
    with torch.device("meta"):
        model = load_model(config, None, args.attn, args.seed)
    if args.attn == "auto" and model._supports_flash_attn and has_flash_attention(args):
        model.set_attn_implementation("flash_attention_2")
    facts = {
        "parameters": model.num_parameters(),
        "attention": model.config._attn_implementation,
        "flops_per_token": flops_per_token(model, args.seq_length),
        "device_name": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
    }
    facts["peak_flops"] = peak_flops(facts["device_name"])
    say(f"{facts['parameters']:,} parameters, {facts['attention']}, {args.dtype}, {device}")

    # The model's transformer blocks. transformers knows the name of their class for each
    # architecture, so that nothing here depends on how one of them is built.
    blocks = [m for m in model.modules() if type(m).__name__ in model._no_split_modules]
    for block in blocks:
        # All blocks have the same code, so compiling it once serves all of them.
        if args.compile:
            block.forward = torch.compile(block.forward)
        # Activation checkpointing: keep the input of a block only, and compute everything else in
        # it again when the backward needs it.
        if args.activation_checkpointing:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    # Mixed precision: parameters are gathered in `dtype`, and gradients are averaged in fp32.
    mixed_precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy() if args.cpu_offload else OffloadPolicy()

    # Sharding: each rank keeps 1 / world_size of every parameter. The ranks gather the parameters
    # of a block before its forward, drop them behind it, gather them again for its backward, and
    # then each rank gets its shard of the averaged gradient. A block is gathered as a whole, so it
    # is what must fit beside the shards. The root module has what is left: embeddings and norm.
    mesh = init_device_mesh(device.type, (world_size,))
    for module in [*blocks, model]:
        fully_shard(module, mesh=mesh, mp_policy=mixed_precision, offload_policy=offload)
    if args.no_reshard_after_forward:
        model.set_reshard_after_forward(False)

    # Now each rank allocates its shards, and receives their values from rank 0.
    model.to_empty(device="cpu" if args.cpu_offload else device)
    fill_from_rank_0(model, full_model, device)
    del full_model

    # Optimizer. Weight decay is for matrices. Biases and the weights of norms are vectors.
    # `fused` updates all parameters in a few kernels instead of several for each parameter.
    args.lr = args.lr or (2e-5 if weights else 1e-3)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, args.lr, fused=True)

    # Learning rate. All schedules are functions of the step, so a resume needs the step only and no
    # state of the scheduler. We call its function ourselves, with the step.
    warmup_steps = args.warmup_steps
    if warmup_steps is None:
        warmup_steps = min(100, total_steps // 10)
    scheduler = transformers.get_scheduler(args.lr_scheduler, optimizer, warmup_steps, total_steps)
    lr_factor = scheduler.lr_lambdas[0]
    # fp16 cannot represent small gradients. The scaler multiplies the loss by a large number before
    # the backward, and divides the gradients by it afterwards. With other dtypes it does nothing.
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "fp16")

    # Resume from the newest checkpoint of this run, if there is one, then open the log there.
    state = load_checkpoint(run_dir, model, optimizer) if run_dir else {"step": 0}
    start = state["step"]
    if start >= total_steps and (run_dir / "final_model" / f"step-{start:08d}").exists():
        say(f"{run_dir} is finished at step {start}: raise --max-steps or --num-epochs")
        return
    if "total_steps" in state and state["total_steps"] != total_steps:
        say(f"learning rate: scheduled over {total_steps} steps, before {state['total_steps']}")
    if "scaler" in state:
        scaler.load_state_dict(state["scaler"])
    log = RunLog(run_dir, start, total_steps, state.get("comet_key"), vars(args), facts)

    for step in range(start + 1, total_steps + 1):
        # Data. The seed and the epoch alone decide the order of an epoch's samples, and the step
        # decides which part of it is this step's global batch. So a resume continues exactly where
        # the run was, without any state of a data loader.
        epoch, step_in_epoch = divmod(step - 1, steps_per_epoch)
        if step_in_epoch == 0 or step == start + 1:
            order = np.random.default_rng((args.seed, epoch)).permutation(len(train_data))
        first = step_in_epoch * args.global_batch_size
        indices = order[first : first + args.global_batch_size]

        micro_batches, num_targets = make_micro_batches(
            train_data, indices, args.batch_size, device
        )
        dist.all_reduce(num_targets)  # the sum over all ranks replaces each rank's own number
        num_targets.clamp_(min=1)  # a batch without any target has loss 0, not 0 / 0
        log.lap("data")

        # Forward and backward. The gradients of all micro-batches add up in `.grad`.
        optimizer.zero_grad()
        step_loss = torch.zeros((), device=device)
        for i, (input_ids, targets) in enumerate(micro_batches):
            # Gradients are averaged once per step, in the backward of its last micro-batch.
            is_last = i == len(micro_batches) - 1
            model.set_requires_gradient_sync(is_last)
            # Parameters that are kept after a forward are kept until the last backward of the step.
            model.set_reshard_after_backward(is_last or not args.no_reshard_after_forward)

            loss = loss_sum(model, input_ids, targets)
            step_loss += loss.detach()
            log.lap("forward")

            # The loss is the mean over all targets of the global batch. The mean of the means of
            # micro-batches would be another one, as soon as they have unequal numbers of targets.
            # The average over the ranks divides the sum of their gradients by world_size. But the
            # number of targets is that of all ranks already, so the division is undone here.
            scaler.scale(loss * world_size / num_targets).backward()
            log.lap("backward")

        # Update. Gradients longer than `max_grad_norm` are shortened to it, so that one unusual
        # batch cannot throw the model far away.
        scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        lr = args.lr * lr_factor(step - 1)
        for group in optimizer.param_groups:
            group["lr"] = lr
        scaler.step(optimizer)
        scaler.update()
        log.lap("update")

        # Log. `.item()` and `.tolist()` wait until the GPU has computed the value. Python would
        # wait in every step, so values are read in the steps that are logged only.
        metrics = {}
        if step == 1 or step % args.log_freq == 0 or step == total_steps:
            dist.all_reduce(step_loss)
            memory = memory_gb(model, optimizer, device)
            dist.all_reduce(memory, dist.ReduceOp.MAX)
            grad_norm = grad_norm.full_tensor()  # each rank has a part of its square
            metrics = {
                "loss": step_loss.item() / num_targets.item(),
                "grad_norm": grad_norm.item(),
                "learning_rate": lr,
                "epoch": step / steps_per_epoch,
                **log.times(),
                **dict(zip(MEMORY_METRICS, memory.tolist(), strict=True)),
            }

        # Evaluate on text that the model was not trained on.
        if step == total_steps or (args.eval_freq and step % args.eval_freq == 0):
            metrics.update(evaluate(model, eval_data, args.batch_size, device))
            log.lap("outside")
        log.step(step, metrics)
        log.lap("log")

        # Checkpoint: model and optimizer, and what else a resume needs.
        if run_dir and (step == total_steps or step % args.ckpt_freq == 0):
            values = {
                "flags": vars(args),
                "experiment": experiment(args),
                "total_steps": total_steps,
                "comet_key": log.comet_key,
                "scaler": scaler.state_dict(),
            }
            times = save_checkpoint(run_dir, step, model, optimizer, values, args.keep_checkpoints)
            log.after_checkpoint(times)
            log.lap("outside")

    # Export the model for `from_pretrained`. Then let it continue 32 tokens of held-out text.
    if run_dir:
        save_final_model(run_dir, max(start, total_steps), model, config, tokenizer)
    log.close()
    tokens = sample(model, eval_data[-1]["input_ids"][:256], 32, device)
    say(f"{tokenizer.decode(tokens[:32])} [the model goes on] {tokenizer.decode(tokens[32:])}")


def load_config(name, from_scratch):
    """Returns the model's config, its tokenizer, and the path or hub id of its weights.

    The path is None if the model starts from random weights."""
    if name == "tiny":
        config = transformers.LlamaConfig(
            vocab_size=384,
            hidden_size=128,
            intermediate_size=320,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=256,
            bos_token_id=0,
            eos_token_id=0,
        )
        return config, byte_tokenizer(), None

    files = [file.name for file in Path(name).glob("*")]  # none: it is an id on the hub
    has_tokenizer = not files or any("token" in file or "vocab" in file for file in files)
    endings = (".safetensors", ".bin", ".pt")
    has_weights = not files or any(ending in file for file in files for ending in endings)
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        config = config.get_text_config()  # of a model for text and images, the part for text
        if has_tokenizer:
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        else:
            tokenizer = byte_tokenizer()
            say(f"{name} has no tokenizer: its tokens are bytes here")
    except Exception as error:  # a damaged file makes the libraries raise errors of any type
        fail(f"--model-name {name}: {type(error).__name__}: {error}")
    if len(tokenizer) > config.vocab_size:
        fail(f"--model-name {name}: {len(tokenizer)} tokens, a vocabulary of {config.vocab_size}")

    # Dropout draws random numbers. A batch that is split differently would get different ones.
    for key, value in vars(config).items():
        if value and ("dropout" in key or "pdrop" in key):
            setattr(config, key, 0.0)
            say(f"{key} is {value} in {name} and 0 here")
    return config, tokenizer, name if has_weights and not from_scratch else None


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


def load_data(name, subset, tokenizer, seq_length):
    """Returns the sequences to train on and those to evaluate on.

    These are a split called validation or test, or else the last 5 % of the training data."""
    try:
        # The processes of a node take turns: the first tokenizes, the others read its cache.
        with FileLock(f"/tmp/train-llm-{os.getuid()}.lock"):
            splits = load_splits(name, subset, tokenizer, seq_length)
            if "train" not in splits:
                raise ValueError(f"no split is called train, there are {list(splits)}")
            train = pack(splits["train"], tokenizer, seq_length)
            for split in ("validation", "test"):
                if split in splits:
                    return train, pack(splits[split], tokenizer, seq_length)
    except Exception as error:  # a damaged file makes the libraries raise errors of any type
        fail(f"--dataset-name {name}: {type(error).__name__}: {error} {error.__cause__ or ''}")
    num_held_out = math.ceil(len(train) / 20)
    num_train = len(train) - num_held_out
    return train.select(range(num_train)), train.select(range(num_train, len(train)))


def load_splits(name, subset, tokenizer, seq_length):
    """Returns the splits of a data set by name: of documents, or of rows that hold tokens."""
    if name == "python-docs":
        datasets.disable_progress_bars()
        return {"train": datasets.Dataset.from_dict({"text": list(topics.values())})}
    if name == "dummy":
        tokens = np.random.default_rng(0).integers(len(tokenizer), size=(4096, seq_length))
        return {"train": datasets.Dataset.from_dict({"input_ids": tokens})}

    path = Path(name)
    source = {"path": name, "name": subset}
    if path.suffix in {".txt", ".json", ".jsonl", ".parquet"}:
        source = {"path": str(path.resolve().parent), "data_files": path.name}
    if path.suffix == ".txt" or any(path.rglob("*.txt")):
        source["sample_by"] = "document"  # a file is a document, not each of its lines
    return datasets.load_dataset(**source)


def pack(documents, tokenizer, seq_length):
    """Turns a data set of documents into one of sequences, with a column `input_ids`.

    Rows that have input_ids (and maybe labels) already are taken as they are."""
    if "input_ids" in documents.column_names:
        length = len(documents[0]["input_ids"])
        if length != seq_length:
            raise ValueError(f"its input_ids have {length} tokens, --seq-length is {seq_length}")
        sequences = documents
    else:
        packer = Packer(text_column(documents), tokenizer, seq_length)
        columns = documents.column_names
        sequences = documents.map(packer, batched=True, remove_columns=columns)
    used = [name for name in ("input_ids", "labels") if name in sequences.column_names]
    return sequences.with_format("torch", columns=used)


def text_column(documents):
    """The name of the column to train on: `text`, or else the first that holds strings."""
    columns = []
    for name, feature in documents.features.items():
        if getattr(feature, "dtype", "").endswith("string"):
            columns.append(name)
    if not columns:
        raise ValueError(f"no column holds text, there are {documents.column_names}")
    return "text" if "text" in columns else columns[0]


class Packer:
    """Joins the tokens of documents and cuts them into sequences of one length (packing)."""

    def __init__(self, column, tokenizer, seq_length):
        self.column = column
        self.tokenizer = tokenizer
        self.seq_length = seq_length
        self.leftover = []  # tokens that wait for the next documents to fill a sequence

    def __call__(self, documents):
        tokens = self.leftover
        for ids in tokenize(documents[self.column], self.tokenizer):
            tokens += ids
        end = len(tokens) - len(tokens) % self.seq_length
        self.leftover = tokens[end:]
        starts = range(0, end, self.seq_length)
        return {"input_ids": [tokens[i : i + self.seq_length] for i in starts]}


def tokenize(texts, tokenizer):
    """Token ids of each text, with the end-of-text token behind them."""
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    documents = tokenizer([text or "" for text in texts])["input_ids"]
    # Some tokenizers add the token themselves.
    return [ids if ids[-1:] == eos else ids + eos for ids in documents]


def load_model(config, weights, attn, seed):
    """The model in fp32 on the CPU, with pretrained weights or, if these are None, random ones."""
    torch.manual_seed(seed)
    options = {
        "attn_implementation": None if attn == "auto" else attn,
        "dtype": torch.float32,
        "trust_remote_code": False,
    }
    try:
        if weights is None:
            return transformers.AutoModelForCausalLM.from_config(config, **options)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            weights, config=config, output_loading_info=True, **options
        )
    except Exception as error:  # a damaged file makes the libraries raise errors of any type
        fail(f"--model-name {weights or config.name_or_path}: {type(error).__name__}: {error}")
    if info["missing_keys"]:
        fail(f"--model-name {weights}: it lacks weights for {sorted(info['missing_keys'])[:3]}")
    return model.train()


def fill_from_rank_0(model, full_model, device):
    """Copies the weights of `full_model`, which rank 0 has, to the shards of all ranks.

    Calling reset_parameters() on each rank instead would not give what the architecture starts
    from, and no pretrained weights."""
    weights = full_model.state_dict() if full_model else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)

    # Some buffers are in no state dict, such as the frequencies of rotary embeddings.
    for name, buffer in list(model.named_buffers()):
        if full_model:
            buffer = full_model.get_buffer(name)
        buffer = buffer.to(device)
        dist.broadcast(buffer, src=0)
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, buffer)


def has_flash_attention(args):
    """Whether FlashAttention-2 is installed, and device and dtype are what it takes."""
    on_gpu = args.device != "cpu" and torch.cuda.is_available()
    return on_gpu and args.dtype != "fp32" and transformers.utils.is_flash_attn_2_available()


def flops_per_token(model, seq_length):
    """Floating-point operations per token, forward and backward: 6 N + 12 L H D T.

    N: parameters, without embeddings that are not the output layer too. L layers, H heads of D
    dimensions, T tokens in a sequence: attention, without regard to its mask.
    Source: PaLM, arXiv:2204.02311, appendix B."""
    config = model.config
    tables = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    tables.discard(model.get_output_embeddings().weight)
    parameters = model.num_parameters() - sum(table.numel() for table in tables)

    heads = getattr(config, "num_attention_heads", 0)
    head_dim = vars(config).get("head_dim")
    attention_width = heads * head_dim if head_dim else config.hidden_size if heads else 0
    return 6 * parameters + 12 * config.num_hidden_layers * attention_width * seq_length


def peak_flops(device_name):
    """FLOP/s of a device at best, 0 if it is not in the table: then MFU is not logged."""
    for name, peak in PEAK_FLOPS.items():
        if name in device_name:
            return peak
    return 0


def make_micro_batches(data, indices, batch_size, device):
    """Loads this rank's share of a global batch, `indices`, in micro-batches of `batch_size`.

    Returns a list of (input_ids, targets), int64 tensors of shape (B, T) on the device, and the
    number of targets, a CPU tensor. targets[:, i] is the token that follows input_ids[:, i], or
    -100 where the loss leaves it out."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    share = list(indices[rank::world_size])
    # If the batch cannot be divided equally, the last ranks have a sequence less. They repeat one,
    # without targets: all ranks must call the collectives of the backward equally often.
    is_short = len(share) < math.ceil(len(indices) / world_size)
    if is_short:
        share.append(indices[0])

    micro_batches = []
    num_targets = torch.tensor(0)
    for first in range(0, len(share), batch_size):
        rows = data[share[first : first + batch_size]]
        input_ids = rows["input_ids"]
        labels = rows.get("labels", input_ids)
        targets = F.pad(labels[:, 1:], (0, 1), value=-100)  # nothing follows the last token
        if is_short and first + batch_size >= len(share):
            targets[-1] = -100
        num_targets += (targets != -100).sum()

        # A copy from pinned memory runs beside other work: the CPU does not wait for it.
        if device.type == "cuda":
            input_ids = input_ids.pin_memory().to(device, non_blocking=True)
            targets = targets.pin_memory().to(device, non_blocking=True)
        micro_batches.append((input_ids, targets))
    return micro_batches, num_targets


def loss_sum(model, input_ids, targets):
    """The sum of the cross-entropies of all targets, in nats: a scalar on the device."""
    logits = model(input_ids=input_ids, use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


@torch.no_grad()
def evaluate(model, data, batch_size, device):
    """Mean loss over the targets of `data` in nats, and the perplexity, as metrics."""
    micro_batches, num_targets = make_micro_batches(data, range(len(data)), batch_size, device)
    total = torch.zeros((), device=device)
    for input_ids, targets in micro_batches:
        total += loss_sum(model, input_ids, targets)
    model.reshard()  # what the forward has gathered: no backward follows, which would drop it
    dist.all_reduce(total)
    dist.all_reduce(num_targets)
    loss = (total.cpu().double() / num_targets).item()  # NaN if there is no target
    return {"eval/loss": loss, "eval/perplexity": float(np.exp(loss))}


@torch.no_grad()
def sample(model, tokens, start, device):
    """Replaces the tokens from index `start` on by tokens that the model draws. Returns (T,)."""
    tokens = tokens[None].clone()
    generator = torch.Generator().manual_seed(0)
    for i in range(start, tokens.shape[1]):
        # The whole sequence each time, so that its shape stays the same. The old tokens behind i
        # do no harm: attention is causal.
        logits = model(input_ids=tokens.to(device), use_cache=False).logits
        logits = logits[0, i - 1].float().cpu() / 0.8  # temperature: below 1 is less random
        probabilities = logits.nan_to_num().softmax(0)
        tokens[0, i] = torch.multinomial(probabilities, 1, generator=generator)
    model.reshard()
    return tokens[0]


def parse_args():
    """Returns the flags: of the command line, else of the run's checkpoint, else the defaults."""
    parser = argparse.ArgumentParser(fromfile_prefix_chars="@", description=__doc__.splitlines()[0])
    parser.convert_arg_line_to_args = shlex.split  # @FILE reads flags from a file
    parser.error = fail
    # A switch has two forms, such as --compile and --no-compile.
    switch = {"action": argparse.BooleanOptionalAction, "default": False}

    add = parser.add_argument_group("run").add_argument
    add("-e", "--experiment-name", help="keep logs, checkpoints and model in SAVE_DIR/NAME; resume")
    add("--save-dir", default=str(ROOT / "outputs"), help="default: outputs, beside this folder")
    add("--seed", type=zero_or_more(int), default=0)
    add("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    add("--dtype", choices=tuple(DTYPES), help="default: bf16 on a GPU, fp32 on a CPU")
    add("--log-freq", type=positive(int), default=10, help="steps between log lines")
    add("--ckpt-freq", type=positive(int), default=500, help="steps between checkpoints")
    add("--keep-checkpoints", type=positive(int), default=2, help="how many of the newest to keep")
    add("--comet-project-name", default="train-llm")
    add("--comet-workspace", help="default: the one of your account")
    add("--comet-offline", help="archives to upload later, no account needed", **switch)

    add = parser.add_argument_group("model and data").add_argument
    add("-m", "--model-name", default="tiny", help="tiny, a hub id, or a folder")
    add("--from-scratch", help="take the architecture only, not the weights", **switch)
    add("--attn", choices=("auto", "flash_attention_2", "sdpa", "eager"), default="auto")
    add("--activation-checkpointing", help="less memory for up to a third more compute", **switch)
    add("--cpu-offload", help="keep shards and optimizer in the memory of the CPU", **switch)
    add(
        "--no-reshard-after-forward",
        "--keep-gathered",
        action="store_true",
        help="gather parameters once a step: faster, more memory",
    )
    add("--reshard-after-forward", dest="no_reshard_after_forward", action="store_false")
    add("--compile", help="torch.compile each block", **switch)
    add("-d", "--dataset-name", default="python-docs", help="or dummy, a hub id, a file, a folder")
    add("--dataset-subset", help="the configuration of a data set on the hub")
    add("-s", "--seq-length", type=positive(int), help="default: 1024, or the model's limit")
    add("-b", "--batch-size", type=positive(int), default=8, help="sequences per micro-batch")
    add("--global-batch-size", type=positive(int), default=32, help="sequences per optimizer step")
    add("--eval-freq", type=zero_or_more(int), default=0, help="in steps; 0: at the end only")
    add("--eval-sequences", type=positive(int), default=256, help="how many to evaluate at most")

    add = parser.add_argument_group("optimization").add_argument
    add("--num-epochs", type=positive(int), default=3)
    add("--max-steps", type=positive(int), help="ends the run, if it comes before the last epoch's")
    add("--lr", type=positive(float), help="default: 1e-3 from scratch, 2e-5 with loaded weights")
    schedulers = "linear cosine cosine_with_restarts polynomial constant constant_with_warmup"
    add("--lr-scheduler", choices=schedulers.split(), default="cosine")
    add("--warmup-steps", type=zero_or_more(int), help="default: a tenth of the run, at most 100")
    add("--weight-decay", type=zero_or_more(float), default=0.01, help="of matrices only")
    add("--max-grad-norm", type=positive(float), default=1.0)

    # A run that is resumed keeps its flags, unless the command line has others. So the flags are
    # parsed twice: first for the name of the run, then with its flags as the defaults.
    args = parser.parse_args()
    stored = newest_values(run_dir_of(args))
    flags = stored.get("flags", {})
    parser.set_defaults(**{name: flags[name] for name in vars(args) if name in flags})
    args = parser.parse_args()

    check_launcher()
    check_hardware(args)
    if stored:
        check_same_experiment(args, stored)
    return args


def positive(convert):
    """A `type` for flags: numbers above 0. `convert` is int or float."""

    def parse(text):
        value = convert(text)
        if not 0 < value < 2**63:
            raise argparse.ArgumentTypeError(f"{text}: must be above 0 and below 2**63")
        return value

    parse.__name__ = convert.__name__  # argparse names it for what is no number at all
    return parse


def zero_or_more(convert):
    """A `type` for flags: numbers from 0. `convert` is int or float."""

    def parse(text):
        value = convert(text)
        if not 0 <= value < 2**63:
            raise argparse.ArgumentTypeError(f"{text}: must be from 0 and below 2**63")
        return value

    parse.__name__ = convert.__name__
    return parse


def check_launcher():
    """Ends the run if it was started in a way that this rung does not serve."""
    if "LOCAL_RANK" not in os.environ:
        fail("this rung needs torchrun: torchrun --standalone --nproc-per-node 2 train-llm.py")


def check_hardware(args):
    """Ends the run if a flag asks for what this machine lacks. Chooses the dtype by default."""
    gpu = args.device != "cpu" and torch.cuda.is_available()
    if args.device == "cuda" and not gpu:
        fail("--device cuda: PyTorch finds no GPU here")
    if gpu and int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count():
        fail(f"--nproc-per-node: there are only {torch.cuda.device_count()} GPUs here")
    if args.dtype == "fp16" and not gpu:
        fail("--dtype fp16: its gradient scaling is for a GPU, a CPU has bf16 and fp32")
    if args.cpu_offload and not gpu:
        fail("--cpu-offload: without a GPU everything is in the memory of the CPU already")
    if args.cpu_offload and args.dtype == "fp16":
        fail("--cpu-offload: not with fp16, whose gradient scale would be read while it is copied")
    args.dtype = args.dtype or ("bf16" if gpu else "fp32")
    if args.attn == "flash_attention_2" and not has_flash_attention(args):
        fail("--attn flash_attention_2: needs a GPU, bf16 or fp16, and pip install -e '.[flash]'")


def run_dir_of(args):
    """The folder of a named run. A run without a name has none."""
    return Path(args.save_dir, args.experiment_name) if args.experiment_name else None


def newest_values(run_dir):
    """The plain values of the run's newest checkpoint that can be read, {} if there is none."""
    if run_dir:
        for _, values in checkpoints(run_dir):
            if values:
                return values
    return {}


def experiment(args):
    """What a resume must not change, by the name of the flag."""
    return {name: getattr(args, name) for name in EXPERIMENT_FLAGS}


def check_same_experiment(args, stored):
    """Ends the run if the checkpoint in its folder, with the values `stored`, is of another one."""
    here = experiment(args)
    # Checkpoints of version 0.1 have the flags only.
    there = stored.get("experiment", {name: stored["flags"].get(name) for name in here})
    for name in {**here, **there}:
        if here.get(name) != there.get(name):
            flag = f"--{name.replace('_', '-')} {here.get(name)}"
            fail(f"{flag}: the run in {run_dir_of(args)} has {there.get(name)}")


def open_run_dir(args):
    """Creates the folder of a named run, and returns its path. None for a run without a name."""
    run_dir = run_dir_of(args)
    try:
        if run_dir:
            run_dir.mkdir(parents=True, exist_ok=True)
            (run_dir / "metrics.jsonl").touch()
    except OSError as error:
        fail(f"--save-dir {args.save_dir}: {error}")
    return run_dir


def shut_down():
    """Ends the process group after a run that succeeded. After an error this could wait forever.

    A process that ends while its gloo threads are busy may abort, and torchrun would report a
    failure (pytorch#179291). So all ranks come to rest first."""
    gc.collect()
    dist.barrier()
    time.sleep(0.2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
    shut_down()

"""Rung 02: a copy of the model in each process, each with its share of every batch (DDP).

alias run="torchrun --standalone --nproc-per-node 2 train-llm.py"
run
run -e notes -d notes.txt --max-steps 200
run -e alpaca -m meta-llama/Llama-3.2-1B -d tatsu-lab/alpaca --compile
"""

import argparse
import gc
import os
import shlex
import sys
import time
from datetime import timedelta
from functools import partial
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
from logs_and_checkpoints import checkpoints, load_checkpoint, save_checkpoint, save_final_model
from tokenizers.pre_tokenizers import ByteLevel
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

transformers.logging.set_verbosity_error()
DEFINING = ("model", "from_scratch", "data", "streaming", "seq_length", "seed", "global_batch_size")
ZERO_OK = {"seed", "warmup_steps", "weight_decay", "eval_freq"}
SCHEDULERS = "linear cosine cosine_with_restarts polynomial constant constant_with_warmup"


@record
def main(args, run_dir, flash):
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[args.dtype]

    # Gradients travel by NCCL on GPUs; what is on a CPU, by gloo.
    local_rank = int(os.environ["LOCAL_RANK"])
    if device.type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        dist.init_process_group("gloo")

    # Data: sequences of one length. The seed and the global batch decide which step reads which.
    config, tokenizer, weights = load_config(args.model_name, args.from_scratch)
    longest = getattr(config, "max_position_embeddings", sys.maxsize)
    args.seq_length = args.seq_length or min(1024, longest)
    if not 2 <= args.seq_length <= longest:
        fail(f"--seq-length {args.seq_length}: {args.model_name} takes from 2 to {longest} tokens")
    train, held_out = load_data(args.dataset_name, args.dataset_subset, tokenizer, args.seq_length)
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
    model = load_model(config, weights, args.attn, args.seed)
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
    # Mixed precision: matrix products of the forward run in `dtype`, and their gradients with them.
    model.forward = torch.autocast(device.type, dtype, args.dtype != "fp32")(model.forward)
    model.to(device)
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)

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

    for step in range(start + 1, total_steps + 1):
        epoch, window = divmod(step - 1, steps_per_epoch)
        if window == 0 or step == start + 1:
            order = np.random.default_rng((args.seed, epoch)).permutation(len(train))
        indices = order[window * args.global_batch_size : (window + 1) * args.global_batch_size]
        micro_batches, num_targets = batches(train, indices, args.batch_size, device)
        dist.all_reduce(num_targets)
        num_targets.clamp_(min=1)  # a step without any has no loss
        optimizer.zero_grad()
        step_loss = torch.zeros((), device=device)
        log.lap("data")
        for input_ids, targets in micro_batches:
            # Gradients are averaged once per step, in the backward of its last micro-batch.
            model.require_backward_grad_sync = targets is micro_batches[-1][1]
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
            metrics = {"loss": step_loss.item() / num_targets.item(), "grad_norm": grad_norm.item()}
            metrics |= {"learning_rate": group["lr"], "epoch": step / steps_per_epoch}
            metrics |= log.times() | dict(zip(MEMORY, memory.tolist(), strict=True))
        if step == total_steps or (args.eval_freq and step % args.eval_freq == 0):
            metrics |= evaluate(model, held_out, args.batch_size, device)
            log.lap("outside")
        log.step(step, metrics)
        log.lap("log")
        if run_dir and (step == total_steps or step % args.ckpt_freq == 0):
            plain = {"flags": vars(args), "total_steps": total_steps, "comet_key": log.comet_key}
            plain["scaler"] = scaler.state_dict()
            times = save_checkpoint(run_dir, step, model, optimizer, plain, args.keep_checkpoints)
            log.saved(times)
            log.lap("outside")
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


def load_data(name, subset, tokenizer, seq_length):
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
                splits = datasets.load_dataset(**source)
            if "train" not in splits:
                raise ValueError(f"no split is called train, there are {list(splits)}")
            train = pack(splits["train"], tokenizer, seq_length)
            for split in ("validation", "test"):
                if split in splits:
                    return train, pack(splits[split], tokenizer, seq_length)
    except Exception as error:
        fail(f"--dataset-name {name}: {type(error).__name__}: {error} {error.__cause__ or ''}")
    rest = len(train) - (len(train) + 19) // 20
    return train.select(range(rest)), train.select(range(rest, len(train)))


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
    return tokens[0]


def parse_args():
    """Returns the flags, checked, the folder of a named run, and if FlashAttention-2 is usable."""
    parser = argparse.ArgumentParser(fromfile_prefix_chars="@", description=__doc__.splitlines()[0])
    parser.convert_arg_line_to_args = shlex.split
    parser.error = fail
    switch = {"action": argparse.BooleanOptionalAction, "default": False}
    add = parser.add_argument_group("run").add_argument
    add("-e", "--experiment-name", help="keep logs, checkpoints and model in SAVE_DIR/NAME; resume")
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
    add("--compile", help="torch.compile each block", **switch)
    add("-d", "--dataset-name", default="python-docs", help="or dummy, a hub id, a file, a folder")
    add("--dataset-subset", help="the configuration of a data set on the hub")
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
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        fail("this rung needs torchrun: torchrun --standalone --nproc-per-node 2 train-llm.py")
    run_dir = Path(args.save_dir, args.experiment_name) if args.experiment_name else None
    stored = next((x["flags"] for _, x in checkpoints(run_dir) if x), {}) if run_dir else {}
    parser.set_defaults(**{k: stored[k] for k in vars(args) if k in stored})  # those given win
    args = parser.parse_args()
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
    if args.dtype == "fp16" and not gpu:
        fail("--dtype fp16: its gradient scaling is for a GPU, a CPU has bf16 and fp32")
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

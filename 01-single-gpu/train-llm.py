"""Stage 01: train a language model in one process, on one GPU or on a CPU.

Try it; train on a text of your own; train a pretrained model further. Without -e nothing is saved.

    python train-llm.py
    python train-llm.py -e notes -d notes.txt --max-steps 200
    python train-llm.py -e gpt2 -d notes.txt -m gpt2
"""

import argparse
import itertools
import json
import math
import sys
import zlib
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
import torch.nn.functional as F
import transformers
from logs_and_checkpoints import (
    WORLD_SIZE,
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


def main(args):
    if WORLD_SIZE > 1:
        fail("this stage runs in one process: for several, start 02-ddp")
    device = torch.device(args.device)
    dtype = DTYPES[args.dtype]
    run_dir = Path(args.save_dir, args.experiment_name) if args.experiment_name else None
    if run_dir:
        open_run_dir(run_dir)

    # Data: sequences of one length, cut from the documents.
    config = load_config(args.model_name)
    tokenizer = load_tokenizer(args.model_name, args.dataset_name)
    train_data, eval_data, seq_length = load_data(args, config, tokenizer)
    experiment = check_data(args, config, train_data, eval_data, seq_length)
    eval_data = eval_data.select(range(min(len(eval_data), args.eval_sequences)))

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
    grad_accum_steps = math.ceil(args.global_batch_size / args.batch_size)
    say(
        f"{args.global_batch_size} sequences per step = "
        f"{grad_accum_steps} micro-batch(es) of at most {args.batch_size}"
    )

    # Model. Its parameters are fp32 whatever the dtype: with the 8 bits of precision that bf16 has,
    # small updates would be rounded away.
    weights = None if args.from_scratch else args.model_name
    export_dtype = (weights and config.dtype) or torch.float32  # that of the pretrained weights
    model = load_model(config, weights, args.attn, args.seed)
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

    model.to(device)

    def forward(input_ids):
        """Logits, (B, T, V), of token ids, (B, T)."""
        # Mixed precision: under autocast, matrix multiplications run in `dtype`, and operations
        # that need more precision in fp32.
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            return model(input_ids=input_ids, use_cache=False).logits

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
            train_data, indices, args.batch_size, device
        )
        num_targets.clamp_(min=1)  # a batch without any target has loss 0, not 0 / 0
        log.lap("data")

        # Forward and backward. The gradients of all micro-batches add up.
        step_loss = torch.zeros((), device=device)
        for input_ids, targets in micro_batches:
            loss = loss_fn(forward(input_ids), targets)
            step_loss += loss.detach()
            log.lap("forward")

            # Divide by the number of targets in the whole global batch, not in the micro-batch.
            # Then every target has the same weight, even if some micro-batches have fewer of them,
            # and the result does not depend on --batch-size.
            scaler.scale(loss / num_targets).backward()
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
            results = evaluate(forward, eval_data, args.batch_size, device, loss_fn)
            log.step(step, results)
        log.lap("outside")  # what is outside of a step does not count for tokens per second

    # Evaluate the trained model, and show what it writes. Then export it for `from_pretrained`.
    results = evaluate(forward, eval_data, args.batch_size, device, loss_fn)
    prompt, text = sample(forward, eval_data[0], 224, tokenizer, device)
    log.step(log.last_step, results)
    say(f"prompt, from text that the model was not trained on: {prompt}")
    say(f"what the model writes after it: {text}")
    if run_dir:
        save_final_model(run_dir, model, tokenizer, export_dtype)
    log.close()


def make_micro_batches(data, indices, batch_size, device):
    """Loads the sequences with these indices, in micro-batches of `batch_size`.

    Returns a list of (input_ids, targets), int64 tensors of shape (B, T) on the device, and the
    number of targets, a scalar there. targets[:, i] is the token that follows input_ids[:, i], or
    -100 where the loss leaves it out."""
    micro_batches = []
    num_targets = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, len(indices), batch_size):
        rows = data[indices[start : start + batch_size]]
        input_ids = rows["input_ids"]
        labels = rows.get("labels", input_ids)
        targets = F.pad(labels[:, 1:], (0, 1), value=-100)  # nothing follows the last token

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
def evaluate(forward, data, batch_size, device, loss_fn):
    """Mean loss over the targets of `data` in nats, and the perplexity, as metrics.

    There is no model.eval(): dropout is 0 in training too."""
    total = torch.zeros((), device=device)
    num_targets = torch.zeros((), dtype=torch.int64, device=device)
    indices = range(len(data))
    for start in range(0, len(data), batch_size):
        batch = indices[start : start + batch_size]
        [(input_ids, targets)], count = make_micro_batches(data, batch, batch_size, device)
        total += loss_fn(forward(input_ids), targets)
        num_targets += count
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

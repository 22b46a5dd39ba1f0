"""What the stages are compared with: a bare loop, transformers.Trainer, accelerate. Same model,
same random tokens (as `-d dummy`), same dtype, same global batch, same optimizer.

    python tests/benchmarks/peers.py bare '{"model": FOLDER, "seq_length": 256, ...}'

prints one line of JSON: the tokens of the steps behind `warm`, when these began and ended, and the
loss of each step. benchmark.py starts it, accelerate's by torchrun."""

import io
import json
import os
import sys
import tempfile
import time
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
import torch.nn.functional as F
import transformers

GPU = torch.cuda.is_available()
# Those of the stages for random weights.
LR, WEIGHT_DECAY, BETAS = 2e-3, 0.1, (0.9, 0.95)


def load_model(how):
    """The model that a stage makes of the same folder and seed."""
    config = transformers.AutoConfig.from_pretrained(how["model"])
    for key in vars(config):  # a stage has none
        if "dropout" in key or "pdrop" in key:
            setattr(config, key, 0.0)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.train()


def load_tokens(how):
    """The sequences of `-d dummy`, the 5 % left out that a stage holds out: (3891, T) int64."""
    vocab_size = transformers.AutoConfig.from_pretrained(how["model"]).vocab_size
    tokens = np.random.default_rng(0).integers(vocab_size, size=(4096, how["seq_length"]))
    return torch.from_numpy(tokens[: 4096 - 205])


def windows(how, tokens):
    """The sequences of each step, those that stage 01 takes."""
    order = np.random.default_rng((0, 0)).permutation(len(tokens))
    size = how["global_batch_size"]
    return [order[i * size : (i + 1) * size] for i in range(how["steps"])]


def tiny_tokenizer():
    """The tokenizer of tiny."""
    return transformers.AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "tiny")


def now():
    if GPU:
        torch.cuda.synchronize()
    return time.time()


def schedule(optimizer, how):
    """As in the stages, where steps count from 1."""
    ends = min(100, how["steps"] // 10) + 1, how["steps"] + 1
    cosine = transformers.get_scheduler("cosine", optimizer, *ends).lr_lambdas[0]
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: cosine(done + 1))


def print_result(how, times, losses, tokens_per_step=None):
    """`times`: the end of each step; `tokens_per_step`: of all processes."""
    tokens_per_step = tokens_per_step or how["global_batch_size"] * how["seq_length"]
    tokens = tokens_per_step * (how["steps"] - how["warm"])
    result = {"tokens": tokens, "begin": times[how["warm"] - 1], "end": times[-1]}
    print(json.dumps(result | {"losses": losses}), flush=True)


def adamw(model):
    """As stage 01 from scratch: only matrices have weight decay."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}]
    groups.append({"params": vectors, "weight_decay": 0.0})
    return torch.optim.AdamW(groups, LR, BETAS, fused=True)


def loss_of(model, ids):
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def bare(how):
    """Forward, backward, clip, fused AdamW on tensors that are in memory already: the limit."""
    device = torch.device("cuda" if GPU else "cpu")
    model = load_model(how).to(device)
    if how["compile"]:
        model.compile()
    optimizer = adamw(model)
    lr, tokens = schedule(optimizer, how), load_tokens(how).to(device)
    steps = [tokens[window].split(how["batch_size"]) for window in windows(how, tokens)]
    times, losses = [], []
    for parts in steps:
        optimizer.zero_grad()
        step_loss = torch.zeros((), device=device)
        for part in parts:
            with torch.autocast(device.type, torch.bfloat16, enabled=GPU):
                loss = loss_of(model, part)
            (loss / len(parts)).backward()
            step_loss += loss.detach() / len(parts)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lr.step()
        times.append(now())
        losses.append(step_loss.item())
    print_result(how, times, losses)


class Clock(transformers.TrainerCallback):
    """Notes when each step of a Trainer ends."""

    def __init__(self):
        self.times = []

    def on_step_end(self, *_, **__):
        self.times.append(now())


def pad(seen, rows):
    """A batch of documents, padded to the longest one. Adds its number of tokens to `seen`."""
    seen.append(sum(len(row["input_ids"]) for row in rows))
    tensors = [torch.tensor(row["input_ids"]) for row in rows]
    stack = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    labels = stack(tensors, padding_value=-100)
    mask = (labels >= 0).long()
    return {"input_ids": stack(tensors), "labels": labels, "attention_mask": mask}


def trainer(how):
    """transformers.Trainer on the same sequences, tokenised and cut beforehand. With `padded` on
    documents as they are, cut at the sequence length and padded to the longest of their batch; then
    the tokens counted are those of documents."""
    seen, clock, collate = [], Clock(), transformers.default_data_collator
    if how["padded"]:
        texts = tiny_tokenizer()(list(topics.values()))["input_ids"]
        rows = [{"input_ids": tokens[: how["seq_length"]]} for tokens in texts]
        collate = partial(pad, seen)
    else:
        tokens = load_tokens(how)
        order = np.concatenate(windows(how, tokens))
        rows = [{"input_ids": ids, "labels": ids} for ids in tokens[order]]

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=how["batch_size"],
            gradient_accumulation_steps=how["global_batch_size"] // how["batch_size"],
            max_steps=how["steps"],
            learning_rate=LR,
            weight_decay=WEIGHT_DECAY,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            lr_scheduler_type="cosine",
            warmup_steps=min(100, how["steps"] // 10),
            optim="adamw_torch_fused",
            bf16=GPU,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            torch_compile=how["compile"],
            use_cpu=not GPU,
        )
        run = transformers.Trainer(
            load_model(how), arguments, collate, train_dataset=rows, callbacks=[clock]
        )
        with redirect_stdout(io.StringIO()):  # its log lines
            run.train()
    tokens_per_step = None
    if how["padded"]:
        parts = how["global_batch_size"] // how["batch_size"]
        counted = seen[how["warm"] * parts : how["steps"] * parts]
        tokens_per_step = sum(counted) / (how["steps"] - how["warm"])
    print_result(how, clock.times, [], tokens_per_step)


def accelerated(how):
    """The loop of accelerate's documentation, under torchrun: DDP, or with `fsdp` FSDP2."""
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

    # What `accelerate launch` would set.
    os.environ |= {"ACCELERATE_USE_CPU": str(not GPU), "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
    model = load_model(how)
    plugin = None
    if how["fsdp"]:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=list(model._no_split_modules),
            reshard_after_forward=True,
        )
    world = int(os.environ["WORLD_SIZE"])
    parts = how["global_batch_size"] // how["batch_size"] // world
    accelerator = Accelerator(
        gradient_accumulation_steps=parts,
        mixed_precision="bf16" if GPU else "no",
        fsdp_plugin=plugin,
        cpu=not GPU,
    )
    if how["fsdp"] and not GPU:
        # On a CPU accelerate ignores the plugin and takes DDP. This turns its FSDP2 on.
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    tokens = load_tokens(how)
    rows = tokens[np.concatenate(windows(how, tokens))]
    loader = torch.utils.data.DataLoader(rows, batch_size=how["batch_size"])
    optimizer = adamw(model)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    lr = schedule(optimizer.optimizer, how)  # not prepared: then it would step once per process
    if how["fsdp"] != isinstance(model, torch.distributed.fsdp.FSDPModule):
        sys.exit("accelerate did not make of the model what was asked for")
    times, losses, step_loss = [], [], 0
    for part in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, part)
            accelerator.backward(loss)
            step_loss += loss.detach() / parts
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            lr.step()
            times.append(now())
            losses.append(accelerator.reduce(step_loss, "mean").item())
            step_loss = 0
    if accelerator.is_main_process:
        print_result(how, times, losses)
    accelerator.wait_for_everyone()
    time.sleep(0.2)
    accelerator.end_training()


PEERS = {"bare": bare, "trainer": trainer, "accelerated": accelerated}

if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    PEERS[sys.argv[1]]({"padded": False, "fsdp": False, "compile": False} | json.loads(sys.argv[2]))

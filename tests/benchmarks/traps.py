"""Traps into which guides to training language models fall, each shown by a measurement.

    python tests/benchmarks/traps.py NAME...    writes outputs/measured/trap-NAME.md
    python tests/benchmarks/traps.py lines-02   prints the rows of `lines` for a stage
    python tests/benchmarks/traps.py all        all of them but `join`

`join` takes two minutes, `lines` three, and each other one some seconds.

Numbers do not depend on the speed of the machine, but for the seconds of `join`. MEASURED is the
folder for the tables, if not outputs/measured.
"""

import contextlib
import copy
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from functools import cache
from pathlib import Path

# When this is started as a script: where conftest.py is, and what is in tests/support.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "support"))

try:
    import pytest  # noqa: F401 (conftest.py needs it)
except ImportError:
    sys.exit("traps.py shares code with the tests. Once: pip install -e '.[test]'")

import datasets
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from bench_common import MEASURED, table
from conftest import FAULTS, TINY, data_args, end, load, metrics, mutant, run, save_tokenizer
from datasets.distributed import split_dataset_by_node
from nodes import free_port
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.utils.data import DataLoader, DistributedSampler
from trap_lines import LINES, lines

CPU = torch.device("cpu")
# What a checkpoint holds besides tensors, where nothing depends on it.
VALUES = {"flags": {}, "experiment": {}}


@cache
def tiny():
    """Stage 01 as a module, the config of its tiny model, and its data, 64 tokens a sequence."""
    stage = load("01-single-gpu")
    config = stage.load_config(stage.TINY)
    args = data_args("python-docs", 64)
    train, held_out, length = stage.load_data(args, config, stage.load_tokenizer(TINY, ""))
    return stage, config, train, held_out.select(range(64))


def eval_loss(model):
    """The loss of the 64 sequences that are held out."""
    stage, _, _, held_out = tiny()
    forward = logits_of(model)
    return stage.evaluate(forward, held_out, 64, CPU, stage.sum_cross_entropy)["eval/loss"]


def logits_of(model):
    """What is `forward` in the stages, without autocast."""
    return lambda ids: model(input_ids=ids, use_cache=False).logits


def loss_sum(model, ids, targets):
    stage, _, _, _ = tiny()
    return stage.sum_cross_entropy(logits_of(model)(ids), targets)


def fit(model, optimizer, first, steps):
    """Trains as stage 01 does, 4 sequences a step; the losses of steps `first` and later."""
    stage, _, train, _ = tiny()
    order = np.random.default_rng((0, 0)).permutation(len(train))
    losses = []
    for step in range(first, first + steps):
        indices = order[4 * step : 4 * step + 4]
        [(ids, targets)], num_targets = stage.make_micro_batches(train, indices, 4, CPU)
        optimizer.zero_grad()
        loss = loss_sum(model, ids, targets) / num_targets
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adamw(model, lr=1e-3):
    return torch.optim.AdamW(model.parameters(), lr, weight_decay=0.01, fused=True)


def flat_gradient(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def rounding(error):
    """What other machines round otherwise is not printed."""
    return f"{error:.2f}" if error > 1e-5 else "< 1e-5"


def twice_and_never(seen, size):
    """Shares of `size` samples which stand more than once in `seen`, and not at all."""
    counts = np.bincount(np.asarray(seen), minlength=size)
    return [f"{100 * np.mean(counts > 1):.1f} %", f"{100 * np.mean(counts == 0):.1f} %"]


def token_mean():
    """The gradient of a global batch whose sequences have unlike numbers of targets.

    It is cut over 2 ranks × 2 micro-batches of 2 sequences. A mean of means gives a token of a
    short answer more weight than one of a long answer. Sources: transformers#34191, #34373."""
    stage, config, train, _ = tiny()
    model = stage.load_model(config, None, "auto", 0)
    [(ids, targets)], _ = stage.make_micro_batches(train, range(8), 8, CPU)
    prompts = [60, 20, 50, 58, 61, 4, 35, 57]
    for row, prompt in enumerate(prompts):
        targets[row, :prompt] = -100
    whole = (targets != -100).sum()
    (loss_sum(model, ids, targets) / whole).backward()
    exact = flat_gradient(model)

    # Rank r has the rows [r::2], as in this course, two in a micro-batch.
    cut = [[(0, 2), (4, 6)], [(1, 3), (5, 7)]]
    recipes = {
        "mean of each micro-batch / 2, mean over ranks": "accelerate's `backward` with the loss "
        "that a model returns; Trainer before transformers#34191",
        "sum / targets of the own rank, mean over ranks": "Trainer with "
        "`average_tokens_across_devices=False`",
        "mean of each micro-batch, not divided by 2": "LambdaLabs' distributed-training-guide, its "
        "page on gradient accumulation",
        "sum / targets of the global batch, mean over ranks": "verl-SpeCo#29, hidden by clipping",
        "sum × ranks / targets of the global batch, mean over ranks": "this course; Trainer in "
        "transformers 5",
    }
    rows = []
    for number, (recipe, who) in enumerate(recipes.items()):
        gradients = []
        for micro_batches in cut:
            model.zero_grad()
            own = sum((targets[list(pair)] != -100).sum() for pair in micro_batches)
            for pair in map(list, micro_batches):
                loss = loss_sum(model, ids[pair], targets[pair])
                mean = loss / (targets[pair] != -100).sum()
                choices = [mean / 2, loss / own, mean, loss / whole, loss * 2 / whole]
                choices[number].backward()
            gradients.append(flat_gradient(model))
        gradient = torch.stack(gradients).mean(0)
        error = ((gradient - exact).norm() / exact.norm()).item()
        cosine = torch.nn.functional.cosine_similarity(gradient, exact, dim=0).item()
        norm = (gradient.norm() / exact.norm()).item()
        rows.append([recipe, rounding(error), f"{norm:.2f}", f"{cosine:.3f}", who])
    head = ["gradient", "relative error", "norm, exact = 1", "cosine with the exact one"]
    return [*head, "who does so"], rows


def bf16_parameters():
    """AdamW on bf16 parameters, without fp32 masters, loses its small steps.

    A step is about as large as the learning rate. bf16 has 8 significant bits, so what is below
    1/512 of a weight rounds to nothing. Sources: AReaL#1292, arXiv:2010.06192. Both columns compute
    the forward and backward in bf16; the second does so by autocast, as stage 01."""
    stage, config, _, _ = tiny()
    warm = stage.load_model(config, None, "auto", 0)
    fit(warm, adamw(warm), 0, 60)
    before = eval_loss(warm)
    rows = []
    for lr in (1e-3, 1e-4, 3e-5, 1e-5):
        unchanged, gains = [], []
        for dtype in (torch.bfloat16, torch.float32):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
            model.load_state_dict(warm.state_dict())
            if dtype == torch.float32:
                model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
            optimizer = adamw(model, lr)
            fit(model, optimizer, 60, 39)
            old = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
            fit(model, optimizer, 99, 1)
            new = torch.cat([p.detach().flatten() for p in model.parameters()])
            unchanged.append(100 * (old == new).float().mean().item())
            plain = stage.load_model(config, None, "auto", 0)
            plain.load_state_dict(model.state_dict())
            gains.append(before - eval_loss(plain))
        rows.append([f"{lr:.0e}", *(f"{u:.0f} %" for u in unchanged), *(f"{g:.3f}" for g in gains)])
    head = ["learning rate", "weights that a step leaves as they were, bf16 parameters"]
    head += ["the same, fp32 parameters", "loss falls in 40 steps by, bf16 parameters"]
    return [*head, "the same, fp32 parameters"], rows


def initialisation():
    """Meta device, to_empty, and reset_parameters() of whatever module has one.

    Those are PyTorch's defaults, not the architecture's. Modules without the method (RMSNorm,
    rotary embeddings, GPT-2's Conv1D) keep what stood in the memory: zeros where it is fresh. The
    numbers of such memory are filled in here, so that they repeat. The first loss is near ln 1024 =
    6.93 whatever is wrong, and this small model learns as fast from PyTorch's defaults: a loss
    proves nothing. inv_freq stands in no state dict, so it is wrong after a load of weights too. In
    transformers 5 the truth is in `init_weights()`. Sources: transformers#42309,
    torchtitan#3775."""
    stage, llama, _, _ = tiny()
    sizes = {"vocab_size": 1024, "n_positions": 256, "n_embd": 128, "n_layer": 3, "n_head": 4}
    gpt2 = transformers.GPT2Config(**sizes, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
    rows = []
    for name, config in (("Llama", llama), ("GPT-2", gpt2)):
        right = stage.load_model(config, None, "auto", 0)
        norm = "model.norm" if name == "Llama" else "transformer.ln_f"
        linear = "transformer.h.0.attn.c_attn"
        if name == "Llama":
            linear = "model.layers.0.self_attn.q_proj"
        ways = ["this course's `load_model`", "reset, memory of zeros"]
        if name == "Llama":
            ways += ["reset, memory of normal numbers", "reset, norms and inv_freq set by hand"]
        ways += ["`model.init_weights()`"]
        if name == "Llama":
            ways += ["trained for 400 steps", "its weights, loaded after `to_empty`"]
        for way in ways:
            torch.manual_seed(0)
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            model.to_empty(device="cpu")
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.data.normal_() if "normal" in way else tensor.data.zero_()
            if "load_model" in way:
                model = right
            if way.startswith("reset"):
                for module in model.modules():
                    if hasattr(module, "reset_parameters"):
                        module.reset_parameters()
            if way.endswith("by hand"):
                for module in model.modules():
                    if type(module).__name__ == "LlamaRMSNorm":
                        torch.nn.init.ones_(module.weight)
                model.model.rotary_emb.inv_freq.copy_(right.model.rotary_emb.inv_freq)
            if "init_weights" in way:
                model.init_weights()
            if way.startswith("trained"):
                model = stage.load_model(config, None, "auto", 0)
                fit(model, adamw(model), 0, 400)
                trained = copy.deepcopy(model.state_dict())
            if way.startswith("its weights"):
                model.load_state_dict(trained)
            row = [name, way, f"{model.get_input_embeddings().weight.std():.2f}"]
            row += [f"{model.get_submodule(linear).weight.std():.3f}"]
            row += [f"{model.get_submodule(norm).weight.mean():.2f}"]
            frequencies = "none"
            if name == "Llama":
                same = torch.equal(model.model.rotary_emb.inv_freq, right.model.rotary_emb.inv_freq)
                frequencies = "right" if same else "wrong"
            row += [frequencies, f"{eval_loss(model):.2f}"]
            fit(model, adamw(model), 0, 30)
            rows.append([*row, f"{eval_loss(model):.2f}"])
    head = ["model", "initialisation", "std of embeddings", "std of a linear weight"]
    return [*head, "mean of a norm's weight", "inv_freq", "loss", "after 30 steps"], rows


def cosine():
    """A cosine over another number of steps than the run has: it ends too late, or climbs again.

    A run of 2000 optimizer steps. Past their end, torch's CosineAnnealingLR and transformers'
    get_cosine_schedule_with_warmup go up. accelerate's prepared scheduler steps once per process
    (AcceleratedScheduler.step)."""
    steps = 2000
    annealing, half = torch.optim.lr_scheduler.CosineAnnealingLR, "cosine"
    ways = {
        "this course: total counts optimizer steps": (half, steps, 0),
        "total counts micro-batches, 4 per step": (half, 4 * steps, 1),
        "`step()` at each of 4 micro-batches": (half, steps, 4),
        "accelerate, 2 processes, total counted after `prepare`": (half, steps, 2),
        "`CosineAnnealingLR(T_max=1000)`, as LambdaLabs' guide": (annealing, 1000, 1),
        "`CosineAnnealingLR`, `T_max` = steps of one of 4 epochs": (annealing, steps // 4, 1),
    }
    rows = []
    for way, (kind, total, per_step) in ways.items():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        if kind is annealing:
            schedule = annealing(optimizer, total)
        else:
            schedule = transformers.get_scheduler(kind, optimizer, 0, total)
        rates = []
        for step in range(1, steps + 1):
            optimizer.step()
            if per_step == 0:
                rates.append(schedule.lr_lambdas[0](step - 1))
            else:
                rates.append(optimizer.param_groups[0]["lr"])
            for _ in range(per_step):
                schedule.step()
        climbs = sum(later > rate + 1e-9 for rate, later in zip(rates, rates[1:], strict=False))
        at = [f"{100 * rates[max(0, steps * part // 4 - 1)]:.0f} %" for part in range(5)]
        rows.append([way, *at, f"{100 * climbs / steps:.0f} %"])
    head = ["learning rate, of its peak, after", "0 % of the run"]
    return [*head, "25 %", "50 %", "75 %", "100 %", "steps at which it climbs"], rows


def permutation():
    """A resume in the middle of the second epoch reads other samples than the run would have.

    1024 samples, 32 a step, stopped after 16 of the epoch's 32 steps and run to its last. A
    DataLoader with shuffle=True draws its order from the global generator when an epoch begins,
    which after a resume stands elsewhere. Source: LambdaLabs' guide, chapter 01."""
    size, batch, windows = 1024, 32, 32
    rows = []

    # The model's initialisation draws from the same generator.
    torch.manual_seed(0)
    torch.nn.Linear(8, 8)
    loader = DataLoader(range(size), batch, shuffle=True)
    list(loader)
    second = torch.cat(list(loader))[: 16 * batch]
    torch.manual_seed(0)
    torch.nn.Linear(8, 8)
    again = torch.cat(list(DataLoader(range(size), batch, shuffle=True)))
    skipped = torch.cat([second, again[16 * batch :]])
    way = "`DataLoader(shuffle=True)`, seeded once; the resume skips 16 batches of the first order"
    rows.append([way, *twice_and_never(skipped, size)])
    restarted = torch.cat([second, again[: 16 * batch]])
    rows.append(["the same, the resume skips nothing", *twice_and_never(restarted, size)])

    shares = []
    for rank in range(2):
        torch.manual_seed(rank)
        order = torch.cat(list(DataLoader(range(size), batch, shuffle=True)))
        shares.append(order[rank::2])
    way = "no resume: 2 ranks with seeds of their own take every other sample of their order"
    rows.append([way, *twice_and_never(torch.cat(shares), size)])

    seen = []
    for window in range(windows):
        if window in (0, 16):
            order = np.random.default_rng((0, 1)).permutation(size)
        seen.append(order[window * batch : (window + 1) * batch])
    way = "this course: `order[k * G : (k + 1) * G]`, order drawn from (seed, epoch)"
    rows.append([way, *twice_and_never(np.concatenate(seen), size)])
    return ["the epoch's samples", "read twice", "never read"], rows


def optimizer_restored():
    """dcp.load into the state_dict of a fresh optimizer restores nothing and raises nothing.

    DCP fills the tensors that it is given. A fresh optimizer has none: its first step makes them.
    `get_state_dict` makes them first. The loss hardly tells: another run goes on. Source:
    torchtnt.utils.optimizer.init_optim_state, which was written for this."""
    stage, config, _, _ = tiny()
    model = stage.load_model(config, None, "auto", 0)
    optimizer = adamw(model)
    fit(model, optimizer, 0, 60)
    with tempfile.TemporaryDirectory() as folder:
        raw, run_dir = Path(folder, "raw"), Path(folder, "run")
        run_dir.mkdir()
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save(states, checkpoint_id=raw)
        stage.save_checkpoint(run_dir, 60, model, optimizer, VALUES, 1)
        rows = []
        for way in ("no stop", "`dcp.load` into `optimizer.state_dict()`", "this course"):
            if way != "no stop":
                model = stage.load_model(config, None, "auto", 1)
                optimizer = adamw(model)
            if way.startswith("`"):
                states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                dcp.load(states, checkpoint_id=raw)
                model.load_state_dict(states["model"])
                optimizer.load_state_dict(states["optimizer"])
            if way == "this course":
                stage.load_checkpoint(run_dir, model, optimizer, {}, {})
            moments = [state["exp_avg"].norm() for state in optimizer.state.values()]
            norm = torch.tensor(moments).norm().item()
            losses = fit(model, optimizer, 60, 10)
            shown = [f"{losses[step]:.3f}" for step in (0, 1, 2, 4, 9)]
            rows.append([way, len(moments), f"{norm:.3f}", *shown])
    head = ["resume after step 60", "parameters with moments", "norm of exp_avg", "loss at step 61"]
    return [*head, "62", "63", "65", "70"], rows


def save_and_die(way, path, states, model, optimizer, share, size, strike):
    """In a child process: saves the second checkpoint, and is killed on the way."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if strike:
                os.environ["STRIKE"] = strike
                sys.path.insert(0, str(FAULTS))
                sys.modules.pop("sitecustomize", None)
                __import__("sitecustomize")
            else:
                # The kernel ends the process in the write that goes beyond: no handler runs.
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                limit = int(share * size)
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            if way == "in place":
                torch.save(states, path / "checkpoint.pt")
            if way == "dcp in place":
                dcp.save(states, checkpoint_id=path / "checkpoint")
            if way == "renamed":
                torch.save(states, path / "checkpoint.tmp")
                os.replace(path / "checkpoint.tmp", path / "checkpoint.pt")
            if way == "course":
                load("01-single-gpu").save_checkpoint(path, 2, model, optimizer, VALUES, 2)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    died = signal.SIGKILL if strike else signal.SIGXFSZ
    if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != died:
        raise RuntimeError(f"{way}: not killed, status {status}")


def kill_during_save():
    """What is left of the only checkpoint when a save over it is killed: real kills, by the kernel.

    A file is cut in the write that would go beyond a part of its length (RLIMIT_FSIZE). The last
    row has a SIGKILL at the opening of a file or at the rename, by tests/support/faults.
    Sources: Lightning#19970, transformers#35580."""
    stage, config, _, _ = tiny()
    model = stage.load_model(config, None, "auto", 0)
    optimizer = adamw(model)
    fit(model, optimizer, 0, 1)
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
    names = {
        "in place": "`torch.save` over the only file",
        "dcp in place": "`dcp.save` over the only folder (it warns)",
        "renamed": "`torch.save` to a temporary file, `os.replace`",
        "course": "this course: temporary folder, flush, rename",
    }
    strikes = ["kill open .tmp/__0_0.distcp 1", "kill open .tmp/.metadata 1"]
    strikes += ["kill open .tmp/state.json 1"]
    strikes += ["kill os.rename step-00000002 2"]  # the first is DCP's, of its metadata
    plans = [(way, share, None) for way in names for share in (0, 0.25, 0.5, 0.75, 0.99)]
    plans += [("course", 0, strike) for strike in strikes]
    results = {}
    for way, share, strike in plans:
        states = {"model": model.state_dict(), "moments": optimizer.state_dict()["state"]}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            if way == "course":
                stage.save_checkpoint(path, 1, model, optimizer, VALUES, 2)
            elif way == "dcp in place":
                dcp.save(states, checkpoint_id=path / "checkpoint")
            else:
                torch.save(states, path / "checkpoint.pt")
            size = max(file.stat().st_size for file in path.rglob("*") if file.is_file())
            save_and_die(way, path, states, model, optimizer, share, size, strike)
            # One step makes the moments that a load fills.
            other = stage.load_model(config, None, "auto", 1)
            moments = adamw(other)
            fit(other, moments, 0, 1)
            found = {"model": other.state_dict(), "moments": moments.state_dict()["state"]}
            try:
                if way == "course":
                    intact = stage.load_checkpoint(path, other, moments, {}, {})["step"] == 1
                    found["moments"] = moments.state_dict()["state"]
                elif way == "dcp in place":
                    intact = dcp.load(found, checkpoint_id=path / "checkpoint") is None
                else:
                    found = torch.load(path / "checkpoint.pt")
                    intact = True
            except (Exception, dcp.api.CheckpointException):
                intact = False
            for name, tensor in states["model"].items():
                intact = intact and torch.equal(found["model"][name], tensor)
            for number, state in states["moments"].items():
                for name, tensor in state.items():
                    intact = intact and torch.equal(found["moments"][number][name], tensor)
            results.setdefault((way, strike is not None), []).append(intact)
    rows = []
    for (way, struck), intact in results.items():
        where = "before an operation on a file" if struck else "in a write, at 0 to 99 % of a file"
        rows.append([names[way], where, len(intact), sum(intact)])
    return ["save", "killed", "times", "a checkpoint can be loaded"], rows


def dct_truncation():
    """Half the bytes of a gradient are saved: the low half of a DCT loses as much as any half.

    A DCT gathers the energy of smooth signals in low frequencies. Neighbours in a gradient are
    unrelated parameters, so half of the spectrum holds half of the energy, whichever half: the
    error is about 0.71, the root of one half. Stage 04's functions, chunks of 256."""
    stage, config, train, _ = tiny()
    four = load("04-compression")
    model = stage.load_model(config, None, "auto", 0)
    fit(model, adamw(model), 0, 30)
    model.zero_grad()
    [(ids, targets)], num_targets = stage.make_micro_batches(train, range(32), 32, CPU)
    (loss_sum(model, ids, targets) / num_targets).backward()
    gradient = flat_gradient(model)
    gradient = gradient[: len(gradient) // 256 * 256]
    draw = torch.Generator().manual_seed(0)
    smooth = torch.randn(len(gradient), generator=draw).cumsum(0)
    low_basis = four.low_frequencies()
    # The rows of the whole matrix, of which stage 04 has the first half.
    n = torch.arange(256, dtype=torch.float64)
    basis = (2 / 256) ** 0.5 * torch.cos(torch.pi / 256 * (n + 0.5) * n[:, None])
    basis[0] /= 2**0.5
    basis = basis.float()
    assert torch.equal(basis[:128], low_basis)
    low = (n < 128).float()
    drawn = torch.zeros(256)
    drawn[torch.randperm(256, generator=draw)[:128]] = 1.0

    errors = {}
    for name, signal_ in (("gradient", gradient), ("smooth", smooth)):
        rows = signal_.view(-1, 256)
        spectrum = rows @ basis.T
        large = torch.zeros_like(rows).scatter_(1, rows.abs().topk(128).indices, 1.0)
        peaks = torch.zeros_like(rows).scatter_(1, spectrum.abs().topk(128).indices, 1.0)
        decoded = {
            "DCT, the low half of a chunk's frequencies, fp32": (spectrum * low) @ basis,
            "DCT, a random half of the frequencies, fp32": (spectrum * drawn) @ basis,
            "DCT, the largest half, fp32, and a bit each for where": (spectrum * peaks) @ basis,
            "no transform, a random half of the values, fp32": rows * drawn,
            "no transform, the largest half, fp32, and a bit each for where": rows * large,
        }
        decoded["no transform, all values, bf16"] = rows.bfloat16().float()
        integers, scales = four.to_int8(rows)
        decoded["no transform, all values, int8"] = integers * scales
        for way, values in decoded.items():
            errors[way, name] = ((values - rows).norm() / rows.norm()).item()
    rows = []
    for way in decoded:
        wire = way.rpartition(" ")[2]
        size = 2.125 if "where" in way else 2.0
        if wire == "int8":
            size = 1 + 4 / 256
        pair = [errors[way, name] for name in ("gradient", "smooth")]
        pair = [f"{error:.2f}" if error > 0.1 else f"{error:.1g}" for error in pair]
        rows.append([way, f"{size:.2f}", *pair])
    head = ["what travels", "bytes a value, fp32 = 4", "relative error of a gradient"]
    return [*head, "of a smooth signal (a random walk)"], rows


def elastic_data():
    """The world size changes in the middle of an epoch, and the sampler's state does not fit.

    1024 samples, 384 of them read. A position per rank means something at one world size only.
    Sources: torchtitan#811, Megatron-Bridge#5637."""
    size, batch = 1024, 8
    rows = []
    for before, after in ((4, 2), (2, 4)):
        change, steps = f"{before} to {after}", 384 // (before * batch)
        seen = []
        for rank in range(before):
            sampler = DistributedSampler(range(size), before, rank, shuffle=True, seed=0)
            seen += list(sampler)[: steps * batch]
        for rank in range(after):
            sampler = DistributedSampler(range(size), after, rank, shuffle=True, seed=0)
            seen += list(sampler)[steps * batch :]
        way = "`DistributedSampler`, each rank skips its steps × batch size"
        rows.append([way, change, *twice_and_never(seen, size)])

        base = datasets.Dataset.from_dict({"x": range(size)}).to_iterable_dataset(num_shards=8)
        read, states = [], []
        for rank in range(before):
            share = split_dataset_by_node(base, rank, before)
            examples = iter(share)
            read += [next(examples)["x"] for _ in range(steps * batch)]
            states.append(share.state_dict())
        for whose in ("its own", "rank 0's"):
            seen = list(read)
            for rank in range(after):
                share = split_dataset_by_node(base, rank, after)
                if whose == "rank 0's" or rank < before:
                    share.load_state_dict(states[rank if whose == "its own" else 0])
                seen += [example["x"] for example in share]
            way = f"`split_dataset_by_node`, each rank loads {whose} state"
            rows.append([way, change, *twice_and_never(seen, size)])

        seen, window = [], before * batch
        order = np.random.default_rng((0, 0)).permutation(size)
        for k in range(size // window):
            world_size = before if k < steps else after
            indices = order[k * window : (k + 1) * window]
            seen += [i for rank in range(world_size) for i in indices[rank::world_size]]
        way = "this course: `order[k * G : (k + 1) * G][rank::world_size]`"
        rows.append([way, change, *twice_and_never(seen, size)])
    return ["who reads what", "world size", "read twice", "never read"], rows


def rank_of_two(rank, function, folder):
    torch.set_num_threads(1)
    meeting = {"init_method": f"file://{folder}/meeting", "rank": rank, "world_size": 2}
    dist.init_process_group("gloo", **meeting)
    results = function(rank)
    if rank == 0:
        Path(folder, "results").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def on_two_ranks(function):
    """Calls a function with the rank in each of two processes, and returns what rank 0 has."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_of_two, (function, folder), nprocs=2)
        return json.loads(Path(folder, "results").read_text())


def shards(rank):
    """One of two ranks, which initialise the tiny model in shards in three ways."""
    stage = load("03-fsdp")
    config = stage.load_config(stage.TINY)
    right = stage.load_model(config, None, "auto", 0)
    results = {}
    for way in ("same", "own", "dealt"):
        with torch.device("meta"):
            model = stage.load_model(config, None, "auto", 0)
        for module in [*model.model.layers, model]:
            fsdp.fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
        model.to_empty(device="cpu")
        torch.manual_seed(rank if way == "own" else 0)
        if way == "dealt":
            stage.send_weights(model, right.state_dict(), CPU, False)
        else:
            model.init_weights()
        equal = 0
        near = 0
        count = 0
        for name, parameter in model.named_parameters():
            full = parameter.full_tensor()
            if full.ndim == 2:
                halves = full.chunk(2)
                equal += (halves[0] == halves[1]).sum().item()
                near += (full == right.get_parameter(name)).sum().item()
                count += full.numel()
        results[way] = [200 * equal / count, 100 * near / count]
    return results


def sharded_init():
    """Random initialisation of DTensors on a CPU: each shard gets the same numbers.

    Each rank draws its shard from its own generator, and all are seeded alike, as they must be for
    what is replicated. DTensor moves the generators apart on devices like CUDA only.
    Two processes, gloo, all matrices of the tiny model, sharded in their rows. Source:
    torch/distributed/tensor/_random.py."""
    results = on_two_ranks(shards)
    names = {
        "same": "`fully_shard`, `to_empty`, `init_weights()`, the same seed on both ranks",
        "own": "the same, seed = rank",
        "dealt": "stage 03: rank 0 initialises all of it and deals it out",
    }
    rows = [[names[way], *(f"{share:.0f} %" for share in pair)] for way, pair in results.items()]
    return ["initialisation", "equal in both shards", "equal to stage 01's weights"], rows


def split_wrongly(rank):
    """One of two ranks, which split a small Llama in several ways and compute a gradient."""
    stage = load("07-tensor-parallel")
    mesh = init_device_mesh("cpu", (2,))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "vocab_size": 384, "attention_bias": True}
    draw = torch.Generator().manual_seed(0)
    batches = torch.randint(384, (2, 4, 32), generator=draw)

    def build(key_value_heads=2, tied=True):
        config = transformers.LlamaConfig(
            **sizes, num_key_value_heads=key_value_heads, tie_word_embeddings=tied
        )
        model = stage.load_model(config, None, "auto", 0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):  # they are zero at first, which hides mistakes
                    torch.nn.init.normal_(parameter, std=0.1)
        return model

    def gradients(model, ids):
        with stage.loss_parallel():
            targets = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
            loss = stage.sum_cross_entropy(logits_of(model)(ids), targets)
            loss.backward()
        return loss.item(), dict(model.named_parameters(remove_duplicate=False))

    reference = build()
    targets = torch.nn.functional.pad(batches[0][:, 1:], (0, 1), value=-100)
    exact_loss = loss_sum(reference, batches[0], targets)
    exact_loss.backward()
    exact = {name: p.grad for name, p in reference.named_parameters(remove_duplicate=False)}

    results = {}
    for way in ("right", "norms", "bias", "untied", "data", "heads"):
        try:
            model = build(key_value_heads=1 if way == "heads" else 2)
            if way == "heads":
                stage.fail = lambda message: None  # stage 07 ends here
            weights = model.state_dict()
            stage.split_layers(model, mesh)
            stage.send_weights(model, weights, torch.device("cpu"), cpu_offload=False)
            if way == "bias":
                for block in model.model.layers:
                    bias = block.self_attn.o_proj.bias.to_local()
                    addend = DTensor.from_local(bias, mesh, [Partial()], run_check=False)
                    block.self_attn.o_proj.bias = torch.nn.Parameter(addend)
            if way == "untied":
                model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
            loss, parameters = gradients(model, batches[rank if way == "data" else 0])
            errors = {}
            for name, parameter in parameters.items():
                gradient = parameter.grad
                is_norm = "norm" in name
                full = gradient.to_local() if way == "norms" and is_norm else gradient.full_tensor()
                errors[name] = ((full - exact[name]).norm() / exact[name].norm()).item()
            worst = max(errors, key=errors.get)
            wrong = sum(error > 1e-4 for error in errors.values())
            loss_error = abs(loss / exact_loss.item() - 1)
            results[way] = [loss_error, wrong, len(errors), worst, errors[worst]]
        except RuntimeError as error:
            results[way] = str(error).splitlines()[0]
    return results


def tensor_parallel():
    """Mistakes in splitting layers over two ranks: loss and gradients against those of one process.

    A Llama of two blocks, with biases in attention and tied embeddings, on four sequences of random
    tokens."""
    results = on_two_ranks(split_wrongly)
    names = {
        "norms": "the gradient of a norm's weight is not added up over the ranks",
        "bias": "each rank adds the bias of a row-wise layer",
        "untied": "tied embeddings, whose weight is not tied again after splitting",
        "data": "the ranks of a group read different sequences",
        "heads": "one head of keys and values, split over two ranks",
        "right": "stage 07",
    }
    rows = []
    for way, name in names.items():
        if isinstance(results[way], str):
            message = re.sub(r"input of size \d+", "input of ...", results[way])
            rows.append([name, f"an error: {message}", "–", "–"])
        else:
            loss_error, wrong, number, worst, error = results[way]
            layer = re.sub(r"^model\.|layers\.\d+\.", "", worst)
            largest = f"{error:.2f} ({layer})" if error > 1e-4 else "< 1e-4"
            loss_error = f"{loss_error:.4f}" if loss_error > 1e-5 else "< 1e-5"
            rows.append([name, loss_error, f"{wrong} of {number}", largest])
    head = ["mistake", "relative error of the loss", "gradients that are wrong"]
    return [*head, "largest relative error of a gradient"], rows


# What is written otherwise in stage 08.
PIPELINE_WRONGLY = {
    "the gradients of the tied weight are not added up over the first and last pipeline stage": [
        ("            gradient += other_gradient\n", "")
    ],
    "each pipeline stage clips its gradients by a norm of its own": [
        ("        dist.all_reduce(squared_norm, group=stage.pipeline)\n", "")
    ],
    "the norm counts the tied weight twice": [(" if stage.is_first or p is not tied_weight]", "]")],
    "the stages of a pipeline read different sequences": [
        ("    share =", "    by = dist.get_rank() // num_shares * num_shares\n    share ="),
        ("(indices[rank::", "(np.roll(indices, by)[rank::"),
    ],
    "stage 08": [],
}


def pipeline_parallel():
    """Mistakes in splitting a model over pipeline stages: losses and norms against one process.

    A Llama of four blocks with tied embeddings, in two pipelines of two stages. It is trained for
    8 steps on the default data, without weight decay."""
    flags = ["-s", 64, "--global-batch-size", 8, "-b", 1, "--eval-sequences", 8, "--max-steps", 8]
    flags += ["--lr", "2e-3", "--weight-decay", 0, "--log-freq", 1, "-e", "a"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("COURSE_HF_HOME", folder)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
        ids = {"vocab_size": 1024, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
        transformers.LlamaConfig(**sizes, **ids).save_pretrained(Path(folder, "model"))
        save_tokenizer(Path(folder, "model"))
        flags += ["-m", Path(folder, "model"), "--from-scratch"]
        run("01-single-gpu", 1, *flags, "--save-dir", Path(folder, "one"))
        one = metrics(Path(folder, "one", "a"))
        for number, (name, edits) in enumerate(PIPELINE_WRONGLY.items()):
            place = Path(folder, str(number))
            path = mutant(place, "08-pipeline-parallel", *edits)
            run("08-pipeline-parallel", 4, *flags, "--save-dir", place, path=path)
            found = metrics(place / "a")
            row = [name]
            for step, key in ((1, "loss"), (1, "grad_norm"), (8, "loss")):
                error = abs(found[step][f"train/{key}"] / one[step][f"train/{key}"] - 1)
                row.append(f"{error:.2g}" if error > 1e-5 else "< 1e-5")
            rows.append(row)
    head = ["mistake", "relative error of the loss at step 1", "of the norm of the gradients"]
    return [*head, "of the loss at step 8"], rows


# What is written otherwise in stage 09, and what gives it away within 8 steps.
CONTEXT_WRONGLY = {
    "stage 09": ([], "–"),
    "each rank counts the positions of its tokens from 0": (
        [("(input_ids=input_ids, position_ids=positions[None],", "(input_ids,")],
        "nothing but a comparison with stage 01, in the fourth digit",
    ),
    "the targets are made after the cut": (
        [
            (
                "[(x[:, own], targets[:, own]) for",
                "[(x[:, own], F.pad(x[:, own][:, 1:], (0, 1), value=-100)) for",
            ),
            (
                "targets[:, own])\n        num_targets",
                "F.pad(input_ids[:, own][:, 1:], (0, 1), value=-100))\n        num_targets",
            ),
        ],
        "stage 01 finds another loss of the exported model; 62 targets of 63 have a loss",
    ),
    "the triangle of the mask is in the upper left corner": (
        [("mask = causal_lower_right(", "mask = torch.nn.attention.bias.causal_upper_left(")],
        "stage 01 finds another loss of the exported model",
    ),
    "the triangle is one token too large: a token sees its successor": (
        [
            (
                "mask = causal_lower_right(length, end)",
                "mask = torch.ones(length, end, dtype=torch.bool).tril(end - length + 1)",
            )
        ],
        "stage 01 finds another loss of the exported model",
    ),
    "the second chunks of the ranks are put in the order of the ranks": (
        [("second.unbind()[::-1]", "second.unbind()")],
        "nothing but a comparison with stage 01, in the fourth digit",
    ),
    "the gradients of keys and values are not added up": (
        [("full_tensor(grad_placements=[Partial()])", "full_tensor()")],
        "the norm at step 1 is not that of stage 01, and the loss is",
    ),
    "the loss is multiplied by the number of shares": (
        [("(loss * world_size /", "(loss * num_shares /")],
        "the norm at step 1 is half that of stage 01",
    ),
}
CONTEXT_FLAGS = ("-s", 64, "--eval-sequences", 64, "--log-freq", 1, "-e", "a")


def run_context_wrongly(folder, edits, *flags):
    """What stage 09 logs on two ranks, with pieces of its text replaced."""
    path = mutant(folder, "09-context-parallel", *edits)
    run("09-context-parallel", 2, *CONTEXT_FLAGS, *flags, "--save-dir", folder, path=path)
    return metrics(folder / "a")


def exported_loss(folder):
    """The loss of the exported model on the sequences on which the run was evaluated."""
    return eval_loss(transformers.AutoModelForCausalLM.from_pretrained(folder / "a/final_model"))


def context_parallel():
    """Mistakes in splitting sequences over two ranks: what a run logs in 8 steps.

    tiny on the default data, 64 tokens a sequence, without warm-up. Stage 01 computes the loss of
    the exported model on the sequences on which the run was evaluated."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("COURSE_HF_HOME", folder)
        for number, (name, (edits, sign)) in enumerate(CONTEXT_WRONGLY.items()):
            place = Path(folder, str(number))
            found = run_context_wrongly(place, edits, "--max-steps", 8, "--warmup-steps", 0)
            losses = [found[1]["train/loss"], found[8]["train/loss"], found[8]["eval/loss"]]
            row = [f"{loss:.4f}" for loss in [*losses, exported_loss(place)]]
            row.insert(1, f"{found[1]['train/grad_norm']:.3f}")
            rows.append([name, *row, sign])
    head = ["mistake", "loss, step 1", "gradient norm, step 1", "loss, step 8", "eval/loss"]
    return [*head, "of the exported model, by stage 01", "what gives it away"], rows


WORKER = """
import time
from datetime import timedelta
import torch
import torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=90))
print(f"world {dist.get_world_size()}", flush=True)
while True:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.1)
"""


def agent(folder, name, port, share):
    """Starts torchrun as on a node of its own; what it and its worker print is in `name`.log."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--max-restarts=3"]
    command += ["--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    command += ["--rdzv-id=trap", "--rdzv-conf=last_call_timeout=3", "--local-addr=127.0.0.1"]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    variables.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", None)
    if not share:
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with Path(folder, f"{name}.log").open("w") as log:
        return subprocess.Popen(
            [*command, str(Path(folder, "worker.py"))],
            env=variables,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def join():
    """A second node joins a running job of torchrun, whose rendezvous is c10d: all of it dies.

    Agents and workers share one TCPStore. The first rank 0 keeps the address that it published in
    the first round, under that round's key; the node that joins waits for it under the new one,
    60 s long. With TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 workers get a store of their own in each
    round. Source: torch/distributed/elastic/rendezvous/dynamic_rendezvous.py; pytorch#135712."""
    rows = []
    for share in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "worker.py").write_text(WORKER)
            logs, port = [Path(folder, f"{name}.log") for name in "ab"], free_port()
            agents = [agent(folder, "a", port, share)]
            try:
                limit = time.monotonic() + 120
                while "world 1\n" not in logs[0].read_text() and time.monotonic() < limit:
                    time.sleep(0.2)
                begin = time.monotonic()
                agents.append(agent(folder, "b", port, share))
                joined = died = False
                while not joined and not died and time.monotonic() < begin + 150:
                    time.sleep(0.2)
                    joined = all("world 2\n" in log.read_text() for log in logs)
                    died = all(process.poll() is not None for process in agents)
                seconds = time.monotonic() - begin
            finally:
                for process in agents:
                    end(process)
            found = re.findall(r"\b(\w+Error): ", "".join(log.read_text() for log in logs))
            errors = ", ".join(sorted(set(found))) if died else ""
        variable = "not set (the default)" if share else "1"
        outcome = "both train" if joined else "both agents have failed" if died else "hangs"
        rows.append([variable, outcome, f"{seconds:.0f} s", errors])
    head = ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "a second node joins", "after", "errors"]
    return head, rows


TRAPS = {
    "token-mean": token_mean,
    "bf16-parameters": bf16_parameters,
    "initialisation": initialisation,
    "cosine": cosine,
    "permutation": permutation,
    "optimizer-restored": optimizer_restored,
    "kill-during-save": kill_during_save,
    "dct-truncation": dct_truncation,
    "elastic-data": elastic_data,
    "sharded-init": sharded_init,
    "tensor-parallel": tensor_parallel,
    "pipeline-parallel": pipeline_parallel,
    "context-parallel": context_parallel,
    "lines": lines,
    "join": join,
}


def main(names):
    of_stages = {f"lines-{stage[:2]}" for stage, *_ in LINES}
    if unknown := set(names) - {*TRAPS, *of_stages, "all"}:
        sys.exit(f"traps.py: error: no trap is called {', '.join(sorted(unknown))}")
    if not names:
        for name, trap in TRAPS.items():
            print(f"{name:20}{trap.__doc__.splitlines()[0]}")
    if names == ["all"]:
        names = [name for name in TRAPS if name != "join"]
    torch.set_num_threads(1)
    MEASURED.mkdir(exist_ok=True)
    for name in names:
        with contextlib.redirect_stdout(sys.stderr):  # what the stages say
            is_part = name in of_stages
            text = table(*(lines(name[-2:]) if is_part else TRAPS[name]()))
        print(text, flush=True)
        if is_part:
            continue
        command = f"`python tests/benchmarks/traps.py {name}`"
        (MEASURED / f"trap-{name}.md").write_text(f"{command}\n\n{text}")


if __name__ == "__main__":
    main(sys.argv[1:])

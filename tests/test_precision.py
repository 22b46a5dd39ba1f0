"""What each number type promises: what bf16, the default on a GPU, computes in bf16, and what in
fp32. The scale of fp16. And that a checkpoint written beside the steps is that of its own step."""

import json
import math
import shutil
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import SMALL, STAGES, UNWATCHED, exact, metrics, mutant, run
from safetensors.torch import load_file

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# Put first on the path of a run, this watches its dtypes and changes nothing. At the end each rank
# writes what it has seen. In blocks and in backward passes a dispatch mode sees what PyTorch runs:
# operations behind autocast, and what DDP and FSDP send. Of an operation on DTensors it sees those
# on the parts that the rank has.
WATCH = """
import atexit
import json
import os
from collections import defaultdict

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_layers import GradientCheckpointingLayer

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")
seen = defaultdict(set)
losses = {"sum": 0.0, "targets": 0}


def note(name, values):
    for x in values:
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            seen[name].add(str(x.dtype).removeprefix("torch."))


class Watch(TorchDispatchMode):
    def __init__(self, place):
        super().__init__()
        self.place = place

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        space, _, name = function._schema.name.partition("::")
        flat = torch.utils._pytree.tree_leaves((args, kwargs))
        if self.place == "blocks" and (name in PRODUCTS or "dot_product" in name):
            note("products", flat)
        if self.place == "backward" and space == "c10d" and "reduce" in name:
            note("reductions", flat)
        return function(*args, **(kwargs or {}))


def watch_inside(owner, function, place):
    original = getattr(owner, function)

    def watched(*args, **kwargs):
        with Watch(place):
            return original(*args, **kwargs)

    setattr(owner, function, watched)


watch_inside(GradientCheckpointingLayer, "__call__", "blocks")
watch_inside(torch.Tensor, "backward", "backward")


def watch_calls(owner, function, name):
    original = getattr(owner, function)

    def watched(*args, **kwargs):
        result = original(*args, **kwargs)
        note(name, [*args, result])
        if name == "loss" and torch.is_grad_enabled():
            logits, targets = args
            logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
            losses["sum"] += original(logits.detach().double(), targets, **kwargs).item()
            losses["targets"] += (targets != -100).sum().item()
        return result

    setattr(owner, function, watched)


watch_calls(F, "cross_entropy", "loss")
watch_calls(torch.nn.utils, "clip_grad_norm_", "norm")
watch_calls(torch.nn.utils, "clip_grads_with_norm_", "norm")


@register_optimizer_step_post_hook
def after_step(optimizer, args, kwargs):
    for parameter, state in optimizer.state.items():
        note("parameters", [parameter])
        note("gradients", [parameter.grad])
        note("moments", [state["exp_avg"], state["exp_avg_sq"]])


@atexit.register
def write():
    with open(f"{os.environ['SEEN']}/{os.environ.get('RANK', 0)}.json", "w") as file:
        json.dump({**losses, "seen": {name: sorted(seen[name]) for name in seen}}, file)
"""

# One step of two micro-batches on each process. Their gradients go between ranks in FSDP's
# reduce-scatter, in DDP's all-reduce, or in that of the hook of stage 04.
PROCESSES = dict(zip(STAGES, (1, 2, 2, 2, 2, 2, 4, 4, 4, 4), strict=True))
FLAGS = ("-s", 8, "--global-batch-size", 8, "-b", 2, "--max-steps", 1, "--eval-sequences", 1)
FLAGS += ("--device", "cpu", "--dtype", "bf16", "--log-freq", 1)


@pytest.fixture(
    scope="module",
    params=[pytest.param(x, marks=pytest.mark.slow) if x == STAGES[-1] else x for x in STAGES],
)
def watched(request, tmp_path_factory):
    """What a run of a stage has seen on all of its ranks."""
    stage, folder = request.param, tmp_path_factory.mktemp("watched")
    processes = PROCESSES[stage]
    (folder / "path").mkdir()
    (folder / "path" / "sitecustomize.py").write_text(WATCH)
    path = mutant(folder, stage, UNWATCHED) if stage == "09-context-parallel" else None
    flags = (*FLAGS, "-e", "a", "--save-dir", folder, *exact(stage, processes))
    variables = {"PYTHONPATH": str(folder / "path"), "SEEN": str(folder)}
    run(stage, processes, *flags, path=path, **variables)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]
    seen = defaultdict(set)
    for rank in ranks:
        for name, dtypes in rank["seen"].items():
            seen[name] |= set(dtypes)
    loss = sum(rank["sum"] for rank in ranks) / sum(rank["targets"] for rank in ranks)
    return SimpleNamespace(stage=stage, seen=seen, loss=loss, folder=folder / "a")


def test_matrices_are_multiplied_in_bf16(watched):
    """Every matrix multiplication and attention in a block: by autocast in stages 01 and 02, by
    FSDP's `param_dtype` from 03 on."""
    assert watched.seen["products"] == {"bfloat16"}


@pytest.mark.parametrize("name", ["parameters", "gradients", "moments"])
def test_parameters_gradients_and_moments_are_fp32(name, watched):
    assert watched.seen[name] == {"float32"}


def test_gradients_are_sent_in_fp32(watched):
    """The buckets of DDP, what FSDP's reduce-scatter adds up, and what replicas send. (A tensor
    group also adds up gradients, those of hidden states and of the weights of norms, in bf16.)"""
    expected = set() if watched.stage == "01-single-gpu" else {"float32"}
    assert watched.seen["reductions"] == expected


def test_the_loss_and_the_gradient_norm_are_computed_in_fp32(watched):
    """The logits are fp32, and the logged loss is that of float64, from the same logits."""
    assert watched.seen["loss"] == watched.seen["norm"] == {"float32"}
    assert metrics(watched.folder)[1]["train/loss"] == pytest.approx(watched.loss, rel=1e-6)


def test_a_checkpoint_and_the_export_are_fp32(watched):
    """Parameters and both moments. The export of a model from scratch, whatever it computes in."""
    saved = dcp.FileSystemReader(watched.folder / "step-00000001").read_metadata()
    tensors = saved.state_dict_metadata
    for ending in ("norm.weight", "norm.weight.exp_avg", "norm.weight.exp_avg_sq"):
        assert any(name.endswith(f"model.{ending}") for name in tensors), ending
    assert {tensor.properties.dtype for tensor in tensors.values()} == {torch.float32}
    folder = watched.folder / "final_model"
    weights = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "processes"), [("01-single-gpu", 1), ("03-fsdp", 2)])
def test_fp16_halves_its_scale_at_each_step_that_it_skips(stage, processes, tmp_path):
    """It begins with 65536, skips at most a few steps, and a checkpoint has it."""
    flags = (*SMALL, "--max-steps", "8", "-e", "a", "--save-dir", tmp_path, "--log-freq", "1")
    run(stage, processes, *flags, "--dtype", "fp16")
    lines = metrics(tmp_path / "a")
    assert lines[8]["train/loss"] < lines[1]["train/loss"]
    state = json.loads((tmp_path / "a" / "step-00000008" / "state.json").read_text())
    skipped = math.log2(65536 / state["scaler"]["scale"])
    assert skipped in (0, 1, 2)
    assert state["scaler"]["_growth_tracker"] == 8 - skipped


# The checkpoints that stages 05 and 06 write in a thread, beside the steps. This makes a
# writer that is slower than everything else: before it opens the first file of a checkpoint it
# waits until the main thread waits for it, or has ended. DISK is the step in whose save the disk is
# full, and STOP the one in whose save SIGTERM comes.
SLOW_DISK = """
import errno
import os
import signal
import sys
import threading
import time


def main_thread_waits():
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame:
        is_wait = frame.f_code.co_name in ("result", "_python_exit")
        if is_wait and "concurrent" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return not threading.main_thread().is_alive()


def strike(event, args):
    if event != "open" or not str(args[0]).endswith(".tmp/__0_0.distcp"):
        return
    if f"step-{os.environ.get('STOP', ''):>08}" in str(args[0]):
        os.kill(os.getpid(), signal.SIGTERM)
    while not main_thread_waits():
        time.sleep(0.01)
    if f"step-{os.environ.get('DISK', ''):>08}" in str(args[0]):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


sys.addaudithook(strike)
"""
THREADED = ("05-multinode", "06-streaming")


def save_often(stage, folder, steps, **variables):
    """Saves at every second step, with `variables` on a slow disk."""
    if variables:
        (folder / "path").mkdir()
        (folder / "path" / "sitecustomize.py").write_text(SLOW_DISK)
        variables["PYTHONPATH"] = str(folder / "path")
    flags = ("-s", 16, "--global-batch-size", 4, "--eval-sequences", 1, "--log-freq", 1)
    flags += ("--max-steps", steps, "--ckpt-freq", 2, "--keep-checkpoints", 9, "--device", "cpu")
    return run(stage, 1, *flags, "-e", "a", "--save-dir", folder, check=False, **variables)


@pytest.mark.law4
@pytest.mark.parametrize("stage", THREADED)
def test_slow_saves_keep_their_steps_and_a_failed_one_ends_the_run(stage, tmp_path):
    """Steps 2 and 4 are written while the loop would like to go on, and the disk is full at step 6,
    the last one. From each of the two a run goes on as the first did."""
    result = save_often(stage, tmp_path, steps=6, DISK="6")
    assert result.returncode == 1
    assert "[Errno 28] No space left on device" in result.err
    assert not (tmp_path / "a" / "final_model").exists()
    first = metrics(tmp_path / "a")
    for saved in (4, 2):
        for folder in (tmp_path / "a").glob("step-????????"):
            if folder.name > f"step-{saved:08d}":
                shutil.rmtree(folder)
        result = save_often(stage, tmp_path, steps=6)
        assert f"resumed from {tmp_path}/a/step-{saved:08d}" in result.out
        again = metrics(tmp_path / "a")
        for step in range(saved + 1, 7):
            assert again[step]["train/loss"] == first[step]["train/loss"], (saved, step)


@pytest.mark.law4
@pytest.mark.parametrize("stage", THREADED)
def test_a_stop_waits_until_its_checkpoint_is_written(stage, tmp_path):
    result = save_often(stage, tmp_path, steps=500, STOP="2")
    assert result.returncode == 1
    step = int(result.out.split("stopped by SIGTERM after step ")[1].split()[0])
    assert (tmp_path / "a" / f"step-{step:08d}").exists()

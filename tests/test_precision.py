"""With --dtype bf16, the default on a GPU: what is computed in bf16, and what in fp32."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import STAGES, exact, metrics, mutant, run
from safetensors.torch import load_file
from stages import builds_on

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# Put first on the path of a run, this watches its dtypes and changes nothing. At the end each rank
# writes what it has seen. In blocks and in backward passes a dispatch mode sees what PyTorch runs:
# operations behind autocast, and what DDP and FSDP send. Of an operation on DTensors it sees those
# on the parts that the rank has.
WATCH = """
import atexit
import functools
import json
import os
from collections import defaultdict

import torch
import torch.distributed
import torch.nn.attention.bias
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers.modeling_layers import GradientCheckpointingLayer

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")
seen = defaultdict(set)
losses = {"sum": 0.0, "targets": 0}


def note(name, tensors):
    for x in tensors:
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


watches = []


def enter(module, args):
    if isinstance(module, GradientCheckpointingLayer):
        watches.append(Watch("blocks"))
        watches[-1].__enter__()


def leave(module, args, output):
    if isinstance(module, GradientCheckpointingLayer):
        watches.pop().__exit__(None, None, None)


modules.register_module_forward_pre_hook(enter)
modules.register_module_forward_hook(leave)


def patch(owner, name):
    original = getattr(owner, name)

    def wrap(function):
        setattr(owner, name, functools.wraps(original)(functools.partial(function, original)))

    return wrap


def backward(original, *args, **kwargs):
    with Watch("backward"):
        return original(*args, **kwargs)


original_backward = torch.Tensor.backward
torch.Tensor.backward = lambda *args, **kwargs: backward(original_backward, *args, **kwargs)


@patch(F, "cross_entropy")
def cross_entropy(original, logits, targets, **kwargs):
    loss = original(logits, targets, **kwargs)
    note("loss", [logits, loss])
    if torch.is_grad_enabled():
        whole = logits.detach()
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        losses["sum"] += original(whole.double(), targets, **kwargs).item()
        losses["targets"] += (targets != -100).sum().item()
    return loss


@patch(torch.nn.utils, "clip_grad_norm_")
def clip_grad_norm_(original, parameters, *args, **kwargs):
    norm = original(parameters, *args, **kwargs)
    note("norm", [norm])
    return norm


@patch(torch.nn.utils, "clip_grads_with_norm_")
def clip_grads_with_norm_(original, parameters, max_norm, norm):
    note("norm", [norm])
    original(parameters, max_norm, norm)


# Such a mask is a tensor of a class of its own, which PyTorch cannot make while it is watched.
@patch(torch.nn.attention.bias, "causal_lower_right")
def causal_lower_right(original, *sizes):
    with _disable_current_modes():
        return original(*sizes)


original_step = torch.optim.AdamW.step


def step(self, *args, **kwargs):
    parameters = [p for group in self.param_groups for p in group["params"]]
    note("parameters", parameters)
    note("gradients", [p.grad for p in parameters])
    result = original_step(self, *args, **kwargs)
    for state in self.state.values():
        note("moments", [state["exp_avg"], state["exp_avg_sq"]])
    return result


torch.optim.AdamW.step = step


@atexit.register
def write():
    path = os.path.join(os.environ["SEEN"], os.environ.get("RANK", "0") + ".json")
    with open(path, "w") as file:
        json.dump({**losses, "seen": {name: sorted(seen[name]) for name in seen}}, file)
"""


# One step on two or four processes, of two micro-batches each. Their gradients go between ranks in
# FSDP's reduce-scatter, in DDP's all-reduce, or in that of the hook of stage 04.
RUNS = {
    "01-single-gpu": (1, ()),
    "02-ddp": (2, ()),
    "03-fsdp": (2, ()),
    "04-compression": (2, exact("04-compression", 2)),
    "05-multinode": (2, ("--shard-size", 2)),
    "06-streaming": (2, exact("06-streaming", 2)),
    "07-tensor-parallel": (4, ("--tensor-size", 2)),
    "08-pipeline-parallel": (4, ("--stages", 2)),
    "09-context-parallel": (4, ("--context-size", 2)),
    "10-expert-parallel": (4, ("--expert-size", 2)),
}
FLAGS = ("-s", 8, "--global-batch-size", 8, "-b", 2, "--max-steps", 1, "--eval-sequences", 1)
FLAGS += ("--device", "cpu", "--dtype", "bf16", "--log-freq", 1)


def watch(stage, folder, *edits):
    """What a run of a stage, or of a mutant of it, has seen on all of its ranks."""
    processes, flags = RUNS[stage]
    (folder / "path").mkdir()
    (folder / "path" / "sitecustomize.py").write_text(WATCH)
    path = mutant(folder, stage, *edits) if edits else None
    variables = {"PYTHONPATH": str(folder / "path"), "SEEN": str(folder)}
    named = ("-e", "a", "--save-dir", folder)
    run(stage, processes, *FLAGS, *flags, *named, path=path, **variables)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]
    seen = {}
    for name in itertools.chain.from_iterable(rank["seen"] for rank in ranks):
        seen[name] = {dtype for rank in ranks for dtype in rank["seen"].get(name, ())}
    loss = sum(rank["sum"] for rank in ranks) / sum(rank["targets"] for rank in ranks)
    return SimpleNamespace(stage=stage, seen=seen, loss=loss, folder=folder / "a")


@pytest.fixture(
    scope="module",
    params=[pytest.param(x, marks=pytest.mark.slow) if x == STAGES[-1] else x for x in STAGES],
)
def watched(request, tmp_path_factory):
    return watch(request.param, tmp_path_factory.mktemp("watched"))


def test_matrices_are_multiplied_in_bf16(watched):
    """Every matrix multiplication and attention in a block: by autocast in stages 01 and 02, by
    FSDP's `param_dtype` from 03 on."""
    assert watched.seen["products"] == {"bfloat16"}


def test_parameters_gradients_and_moments_are_fp32(watched):
    """What AdamW reads and writes."""
    for name in ("parameters", "gradients", "moments"):
        assert watched.seen[name] == {"float32"}, name


def test_gradients_are_sent_in_fp32(watched):
    """The buckets of DDP, what FSDP's reduce-scatter adds up, and what replicas send. (A tensor
    group also adds up gradients, those of hidden states and of the weights of norms, in bf16.)"""
    expected = set() if watched.stage == "01-single-gpu" else {"float32"}
    assert watched.seen.get("reductions", set()) == expected


def test_the_loss_is_computed_in_fp32(watched):
    """Its logits are fp32, and the logged loss is that of float64, from the same logits."""
    assert watched.seen["loss"] == {"float32"}
    assert metrics(watched.folder)[1]["train/loss"] == pytest.approx(watched.loss, rel=1e-6)


def test_the_gradient_norm_is_fp32(watched):
    assert watched.seen["norm"] == {"float32"}


def test_a_checkpoint_is_fp32(watched):
    """The parameters and both moments of AdamW."""
    metadata = dcp.FileSystemReader(watched.folder / "step-00000001").read_metadata()
    tensors = metadata.state_dict_metadata
    for ending in (
        "model.norm.weight",
        "model.norm.weight.exp_avg",
        "model.norm.weight.exp_avg_sq",
    ):
        assert any(name.endswith(ending) for name in tensors), ending
    assert {tensor.properties.dtype for tensor in tensors.values()} == {torch.float32}


def test_the_export_is_fp32(watched):
    """Weights and config of a model from scratch, whatever its blocks compute in."""
    folder = watched.folder / "final_model"
    weights = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"


# What breaks each of these. All of a list at once: each test is about another line.
LOSS = ("logits.float().flatten(0, 1)", "logits.flatten(0, 1)")
SENT = ("reduce_dtype=torch.float32", "reduce_dtype=dtype")
PARAMETERS = ('"dtype": torch.float32}', '"dtype": torch.bfloat16}')
EXPORT = ("tokenizer, export_dtype)", "tokenizer, dtype)")


def edits_of(stage):
    """Stages 01 and 02 have no line that says what is sent: it is the type of the parameters."""
    return [LOSS, PARAMETERS, EXPORT, *([SENT] if builds_on(stage, "03-fsdp") else [])]


# These stages do the same as 03 and 08.
SLOW = ("07-tensor-parallel", "09-context-parallel", "10-expert-parallel")


@pytest.fixture(
    scope="module",
    params=[pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in STAGES],
)
def broken(request, tmp_path_factory):
    return watch(request.param, tmp_path_factory.mktemp("broken"), *edits_of(request.param))


NOTICED = [
    test_parameters_gradients_and_moments_are_fp32,
    test_gradients_are_sent_in_fp32,
    test_the_loss_is_computed_in_fp32,
    test_the_gradient_norm_is_fp32,
    test_a_checkpoint_is_fp32,
    test_the_export_is_fp32,
]


@pytest.mark.parametrize("test", NOTICED)
def test_a_broken_line_is_noticed(test, broken):
    if broken.stage == "01-single-gpu" and test is test_gradients_are_sent_in_fp32:
        pytest.skip("stage 01 sends nothing")
    with pytest.raises(AssertionError):
        test(broken)


def test_the_logged_loss_tells_bf16_from_fp32(broken):
    """The loss is computed outside of autocast. In bf16 it shows in the number that is logged."""
    logged = metrics(broken.folder)[1]["train/loss"]
    assert logged != pytest.approx(broken.loss, rel=1e-5)


AUTOCAST = ("enabled=dtype != torch.float32", "enabled=False")
GATHERED = ("param_dtype=dtype", "param_dtype=torch.float32")


@pytest.mark.parametrize(
    ("stage", "edit"), [("01-single-gpu", AUTOCAST), ("02-ddp", AUTOCAST), ("03-fsdp", GATHERED)]
)
def test_blocks_in_fp32_are_noticed(stage, edit, tmp_path):
    with pytest.raises(AssertionError):
        test_matrices_are_multiplied_in_bf16(watch(stage, tmp_path, edit))


# The checkpoints that stages 05 and 06 write in a thread.

# A writer that is slower than everything else: before it opens the first file of a checkpoint it
# waits until the main thread waits for it, or has ended. DISK is the step in whose save the disk is
# full, and STOP the one in whose save SIGTERM comes.
SLOW = """
import errno
import os
import signal
import sys
import threading
import time

WAITS = ("result", "_python_exit")


def main_thread_waits():
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame:
        if frame.f_code.co_name in WAITS and "concurrent" in frame.f_code.co_filename:
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


def save_slowly(stage, folder, *edits, steps, **variables):
    (folder / "path").mkdir()
    (folder / "path" / "sitecustomize.py").write_text(SLOW)
    path = mutant(folder, stage, *edits) if edits else None
    flags = ("-s", 16, "--global-batch-size", 4, "--eval-sequences", 1, "--log-freq", 1)
    flags += ("--max-steps", steps, "--ckpt-freq", 2, "--keep-checkpoints", 9, "--device", "cpu")
    named = ("-e", "a", "--save-dir", folder)
    variables["PYTHONPATH"] = str(folder / "path")
    return run(stage, 1, *flags, *named, path=path, check=False, **variables)


def norm_in(folder):
    """A weight in a checkpoint."""
    name = "model.norm.weight"
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {"model": {name: torch.empty(saved[f"model.{name}"].size)}}
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors["model"][name]


def hold_steps_of_their_own(folder):
    one, other = (norm_in(folder / "a" / f"step-{step:08d}") for step in (2, 4))
    assert not torch.equal(one, other)


def say_that_one_failed(folder, result):
    assert "[Errno 28] No space left on device" in result.err
    assert result.returncode == 1
    assert not (folder / "a" / "final_model").exists()


EARLIER = ("                saving.result()  # before its", "                pass  # before its")
LAST = (
    "        saving.result()  # an error of the thread",
    "        pass  # an error of the thread",
)


@pytest.mark.law4
@pytest.mark.parametrize("stage", THREADED)
def test_slow_saves_keep_their_steps_and_failed_ones_end_the_run(stage, tmp_path):
    """Steps 2 and 4 are written while the loop would like to go on. The disk is full at step 6, the
    last one."""
    result = save_slowly(stage, tmp_path, steps=6, DISK="6")
    hold_steps_of_their_own(tmp_path)
    say_that_one_failed(tmp_path, result)


@pytest.mark.law4
@pytest.mark.parametrize("stage", THREADED)
def test_a_loop_that_does_not_wait_for_the_save_before_is_noticed(stage, tmp_path):
    """The checkpoints of steps 2 and 4 get the weights of step 6, and the run ends with 0."""
    assert save_slowly(stage, tmp_path, EARLIER, steps=6).returncode == 0
    with pytest.raises(AssertionError):
        hold_steps_of_their_own(tmp_path)


@pytest.mark.law4
@pytest.mark.parametrize("stage", THREADED)
def test_an_end_that_does_not_wait_for_the_last_save_is_noticed(stage, tmp_path):
    """The run exports and ends with 0, and nobody hears that its last checkpoint is missing."""
    result = save_slowly(stage, tmp_path, LAST, steps=6, DISK="6")
    hold_steps_of_their_own(tmp_path)
    assert result.returncode == 0
    with pytest.raises(AssertionError):
        say_that_one_failed(tmp_path, result)


def has_the_checkpoint_of_its_stop(folder, result):
    assert result.returncode == 1
    step = int(result.out.split("stopped by SIGTERM after step ")[1].split()[0])
    assert (folder / "a" / f"step-{step:08d}").exists()


@pytest.mark.law4
@pytest.mark.parametrize("stage", THREADED)
@pytest.mark.parametrize("edits", [(), (LAST,)])
def test_a_stop_waits_until_its_checkpoint_is_written(edits, stage, tmp_path):
    """However long that takes. The mutant ends at once, and its save with it."""
    result = save_slowly(stage, tmp_path, *edits, steps=100000, STOP="2")
    if edits:
        with pytest.raises(AssertionError):
            has_the_checkpoint_of_its_stop(tmp_path, result)
    else:
        has_the_checkpoint_of_its_stop(tmp_path, result)

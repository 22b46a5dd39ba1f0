"""Law 1: the global batch defines the experiment, hardware only decides how it is cut."""

import math

import numpy
import pytest
import torch
import transformers
from conftest import (
    SMALL,
    assert_same_curve,
    default_sequences,
    exact,
    metrics,
    mutant,
    run,
    tiny_config,
    tiny_model,
)
from torch.nn.functional import cross_entropy

pytestmark = pytest.mark.law1

FIFTY = ("--max-steps", "50", "--dtype", "fp32")
# A learning rate and a clipping that count.
MASKED = ("--max-steps", "8", "--dtype", "fp32", "-b", "2", *SMALL[:4], "--lr", "2e-3")
MASKED += ("--warmup-steps", "0", "--max-grad-norm", "0.5")


def reference(curve, *flags):
    return curve("01-single-gpu", 1, *flags)


def test_the_curve_is_that_of_a_bare_loop(curve):
    """Written a second time, without micro-batches: the order, the shift by one, clipping, AdamW
    with decay of the matrices, warm-up and cosine, the evaluation."""
    flags = ("--max-steps", 12, "--warmup-steps", 3, "--lr", 5e-3, "--weight-decay", 0.5)
    logged = reference(curve, *flags, *SMALL, "-b", 3, "--max-grad-norm", 0.5)
    train, held_out = default_sequences(64)
    order = numpy.random.default_rng((0, 0)).permutation(len(train))
    config = tiny_config()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    vectors = [p for p in model.parameters() if p.ndim < 2]
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))

    def loss_of(rows):
        logits = model(rows).logits[:, :-1]
        return cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    for step in range(12):
        loss = loss_of(train[order[8 * step : 8 * step + 8]])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        factor = (step + 1) / 4 if step < 3 else (1 + math.cos(math.pi * (step - 3) / 9)) / 2
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * factor
        optimizer.step()
        found = {name: logged[step + 1][f"train/{name}"] for name in ("loss", "grad_norm")}
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-5), step
        assert found["grad_norm"] == pytest.approx(norm.item(), rel=1e-4), step
        assert logged[step + 1]["train/learning_rate"] == pytest.approx(5e-3 * factor)
    with torch.no_grad():
        assert logged[12]["eval/loss"] == pytest.approx(loss_of(held_out[:8]).item(), rel=1e-5)


CUTS = [("01-single-gpu", 1, 2), ("02-ddp", 3, 1), ("03-fsdp", 4, 2), ("04-compression", 2, 8)]
CUTS += [("05-multinode", 3, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "processes", "batch_size"), CUTS)
def test_fifty_steps(curve, stage, processes, batch_size):
    """The default batch of 8 sequences in any cut. It does not divide by 3: one rank runs short,
    and in stage 02 it has a micro-batch without targets."""
    flags = (*FIFTY, "-s", "64", "--eval-sequences", "8")
    cut = curve(stage, processes, *flags, "-b", batch_size)
    assert_same_curve(reference(curve, *flags), cut, range(1, 51), cut=processes > 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "processes", "batch_size"), [("02-ddp", 3, 1), ("03-fsdp", 4, 8)]
)
def test_a_rank_that_runs_short(curve, stage, processes, batch_size):
    """2 sequences on 3 or 4 ranks: some have none, and still run their collectives."""
    flags = ("--max-steps", "6", "-s", "64", "--global-batch-size", "2", "--eval-sequences", "5")
    ranks = curve(stage, processes, *flags, "-b", batch_size)
    assert_same_curve(reference(curve, *flags), ranks, range(1, 7))


@pytest.mark.parametrize(
    ("stage", "processes"),
    [("02-ddp", 3), ("03-fsdp", 2), ("04-compression", 2), ("05-multinode", 3)],
)
def test_sequences_with_different_numbers_of_targets(curve, masked_data, stage, processes):
    """The loss is the mean over the targets of the global batch, not a mean of means."""
    flags = (*MASKED, "-d", masked_data)
    ranks = curve(stage, processes, *flags)
    assert_same_curve(reference(curve, *flags), ranks, range(1, 9), cut=True)


def test_the_loss_is_the_mean_over_all_targets(curve, masked_data):
    """One micro-batch of 8 and eight of 1: their means weigh the targets differently."""
    flags = ("--max-steps", "4", *SMALL[:4], "-d", masked_data)
    whole = curve("01-single-gpu", 1, *flags, "-b", 8)
    assert_same_curve(whole, curve("01-single-gpu", 1, *flags, "-b", 1), range(1, 5))


# How often gradients and parameters travel. Lines that are broken are rows of traps.toml.

COUNT_DDP = """    calls = []

    def count(state, bucket):
        calls.extend([1] * bucket.is_last())  # one for a whole set of buckets
        work = dist.all_reduce(bucket.buffer().div_(num_shares), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, count)
"""
COUNT_FSDP = """    calls = []
    for module in [*blocks, model]:
        module.set_all_reduce_hook(lambda output: calls.append(1))
"""
EXCHANGE = '        if self.mode == "none":\n'
HOOKS = {
    "02-ddp": [("    # Optimizer. Matrices", COUNT_DDP + "    # Optimizer. Matrices")],
    "03-fsdp": [("    # Optimizer. Matrices", COUNT_FSDP + "    # Optimizer. Matrices")],
    "04-compression": [
        ("class ReplicaAverage:", "calls = []\n\n\nclass ReplicaAverage:"),
        (EXCHANGE, f"        calls.append(1)\n{EXCHANGE}"),
    ],
}
# What FSDP calls to gather the parameters of a block or of the root; renamed after torch 2.11.
COUNT_GATHERS = """    calls = []
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather = getattr(dist, name)

    def counted(*values, **named):
        calls.append(1)
        return gather(*values, **named)

    setattr(dist, name, counted)
"""
EVERY = {
    "02-ddp": ("model.require_backward_grad_sync = is_last", "pass"),
    "03-fsdp": ("model.set_requires_gradient_sync(is_last)", "pass"),
}
EVERY["04-compression"] = ("replica_average.is_last = is_last", "replica_average.is_last = True")
CALLS = {"02-ddp": 5, "03-fsdp": 5 * 4, "04-compression": 5 * 4}  # steps × (3 blocks and the root)


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param("02-ddp", marks=pytest.mark.slow),
        pytest.param("03-fsdp", marks=pytest.mark.slow),
        "04-compression",
    ],
)
def test_gradients_travel_once_per_step(tmp_path, stage):
    """A hook counts what travels: at 4 micro-batches a quarter of what goes out without care. In
    stage 03 this is the way of --no-reshard-after-forward, in stage 04 that between replicas."""
    say = ("    log.close()\n", '    log.close()\n    say(f"calls {len(calls)}")\n')
    flags = ("--max-steps", "5", "-s", "64", "--global-batch-size", "8", "-b", "1")
    if stage == "03-fsdp":
        flags += ("--no-reshard-after-forward",)
    calls = []
    for name, edits in (("last", ()), ("every", (EVERY[stage],))):
        path = mutant(tmp_path / name, stage, *HOOKS[stage], say, *edits)
        out = run(stage, 2, *exact(stage, 2), *flags, "--eval-sequences", "2", path=path).out
        calls.append(int(out.split("calls ")[1].split()[0]))
    assert calls == [CALLS[stage], 4 * CALLS[stage]]


BUFFERS = """        if step == 3:
            say(f"buffers are sent: {model.will_sync_module_buffers()}")
"""
STORAGES = """            if step == 3 and i == 0:
                storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
                say(f"gradients are in {len(storages)} storages")
"""


@pytest.mark.parametrize("is_mutant", [False, True])
def test_ddp_holds_gradients_once_and_sends_no_constants(is_mutant, tmp_path):
    """A micro-batch whose gradients are not averaged yet adds them up in DDP's buckets. If `.grad`
    is None it puts them beside, in a tensor for each parameter."""
    places = ('        log.lap("data")\n', '            log.lap("backward")\n')
    edits = [(places[0], BUFFERS + places[0]), (places[1], places[1] + STORAGES)]
    if is_mutant:
        edits.append(("set_to_none=False", "set_to_none=True"))
        edits.append(("    model.broadcast_buffers = False\n", ""))
    path = mutant(tmp_path, "02-ddp", *edits)
    flags = ("--max-steps", "3", "-s", "64", "--global-batch-size", "8", "-b", "2")
    out = run("02-ddp", 2, *flags, "--eval-sequences", "2", path=path).out
    storages = int(out.split("gradients are in ")[1].split()[0])
    num_tensors = len(list(tiny_model().parameters()))
    assert storages == num_tensors if is_mutant else storages <= 2
    assert f"buffers are sent: {is_mutant}" in out


def test_parameters_are_gathered_once_per_step_if_they_are_kept(tmp_path, curve):
    """--no-reshard-after-forward: the same curve, and of 4 micro-batches one gather for each of 3
    blocks and the root. Without it a block is gathered for each forward and each backward."""
    flags = ("--max-steps", "3", "-s", "64", "--global-batch-size", "8", "-b", "1")
    place = "    for step in range(steps_done + 1, total_steps + 1):\n"
    ends = "        metrics = {}\n        is_last_step"
    say = '        say(f"calls {len(calls)}")\n'
    edits = [(place, COUNT_GATHERS + place), (ends, say + ends)]
    calls, curves = [], []
    for name, switch in (("without", ()), ("with", ("--no-reshard-after-forward",))):
        path = mutant(tmp_path / name, "03-fsdp", *edits)
        named = ("-e", "a", "--save-dir", tmp_path / name, "--log-freq", 1)
        out = run("03-fsdp", 2, *flags, *named, "--eval-sequences", "2", *switch, path=path).out
        calls.append(int(out.split("calls ")[-1].split()[0]))
        curves.append(metrics(tmp_path / name / "a"))
    assert calls == [3 * 4 * (3 * 2 + 1), 3 * 4]
    assert_same_curve(*curves, range(1, 4))


@pytest.mark.law1
@pytest.mark.parametrize(
    ("stage", "processes"),
    [
        ("03-fsdp", 2),
        pytest.param("04-compression", 4, marks=pytest.mark.slow),
    ],
)
def test_a_rank_keeps_no_more_for_more_micro_batches(stage, processes, curve):
    """16 bytes of state for each parameter, divided by the ranks that share a replica. Gradients
    add up in shards, and the curve is that of one micro-batch."""
    flags = ("--max-steps", "3", "-s", "64", "--global-batch-size", "16")
    shards = processes // 2 if stage == "04-compression" else processes
    one = curve("01-single-gpu", 1, *flags, "-b", "16")
    for batch_size in (8, 1):
        more = curve(stage, processes, *flags, "-b", batch_size)
        expected = 16 * tiny_model().num_parameters() / shards / 1e9
        assert more[3]["memory/state_gb"] == pytest.approx(expected, rel=0.01)
        assert_same_curve(one, more, range(1, 4))

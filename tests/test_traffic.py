"""What a rank of stages 07 to 10 holds and sends: as the chapters count it, and plan.py."""

import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import transformers
from conftest import (
    SIZES,
    SMALL,
    SUPPORT,
    TEST_MODULES,
    UNWATCHED,
    finish,
    fork,
    mutant,
    run,
    save_config,
)

import plan

TENSOR, PIPELINE = "07-tensor-parallel", "08-pipeline-parallel"
CONTEXT, EXPERT = "09-context-parallel", "10-expert-parallel"
FSDP = "03-fsdp"
slow = pytest.mark.slow
AGAIN = "--activation-checkpointing"

WATCH = """
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from collections import Counter

class Watch(TorchDispatchMode):
    largest = 0
    calls = Counter()
    elements = Counter()
    bytes = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(t, (DTensor, AsyncCollectiveTensor)) for t in types):
            return NotImplemented  # its parts come here one by one
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
                Watch.largest = max(Watch.largest, value.numel())
        name = str(function)
        if name.startswith("_c10d_functional") and "wait" not in name:
            name = name.split(".")[1]
            Watch.calls[name] += 1
            Watch.elements[name] += max(args[0].numel(), result.numel())
        if name.startswith("c10d."):  # those of FSDP
            tensors = [value for value in tree_leaves(args) if isinstance(value, torch.Tensor)]
            Watch.bytes[name.split(".")[1]] += max(value.nbytes for value in tensors)
        return result

saved = {}

def note_saved(tensor):
    value = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    value = value.wait() if isinstance(value, AsyncCollectiveTensor) else value
    storage = value.untyped_storage()
    # Also weights are saved. They are no activations, and were there before.
    weights = [p.to_local() if isinstance(p, DTensor) else p for p in watched_model.parameters()]
    if storage.data_ptr() not in [weight.untyped_storage().data_ptr() for weight in weights]:
        saved[storage.data_ptr()] = storage.nbytes()
    return tensor

"""
BEGIN = "@record  # torchrun"
FORWARD = "            loss = loss_fn(forward(input_ids), targets)\n"
HOOKED = """
            held = torch.autograd.graph.saved_tensors_hooks(note_saved, lambda tensor: tensor)
            saved.clear()
            globals()["watched_model"] = model
            with held:
                loss = loss_fn(forward(input_ids), targets)
"""
STEP = '        log.lap("data")\n'
UPDATE = "        # Update. The gradients are clipped"
SAY = """
        watch.__exit__(None, None, None)
        facts = {"largest": Watch.largest, "calls": Watch.calls, "elements": Watch.elements}
        facts |= {"bytes": Watch.bytes, "saved": sum(saved.values())}
        say("FACTS" + json.dumps(facts))
        sys.exit()
"""
# Nothing is compiled while a mode watches every operation.
UNWATCHED_STEP = [
    ("        watch.__enter__()\n", ""),
    ("        watch.__exit__(None, None, None)\n", ""),
]


def watched(folder, stage, processes, *flags, edits=()):
    """What one step of a group of all ranks holds and sends, as rank 0 sees it."""
    edits = [
        (BEGIN, WATCH + "\n" + BEGIN),
        (FORWARD, HOOKED),
        (STEP, STEP + "        watch = Watch()\n        watch.__enter__()\n"),
        (UPDATE, SAY + UPDATE),
        *([UNWATCHED] if stage == CONTEXT else []),
        *edits,
    ]
    sizes = {TENSOR: ("--tensor-size", processes), CONTEXT: ("--context-size", processes)}
    flags = ("--max-steps", 1, "--eval-sequences", 2, *sizes.get(stage, ()), *flags)
    out = run(stage, processes, *flags, path=mutant(folder, stage, *edits)).out
    return json.loads(out.split("FACTS")[1].splitlines()[0])


def micro_batch(folder, architecture="llama", **sizes):
    """Flags of a step with one micro-batch of 4 sequences of 64 tokens."""
    name = "-".join(map(str, sizes.values())) or "m"
    model = save_config(folder / name, architecture, **sizes)
    return ("-m", model, "--from-scratch", "-s", 64, "--global-batch-size", 4, "-b", 4)


def sent_in_a_group(facts, processes):
    """Bytes that a rank sends in the collectives of hidden states, or of keys and values."""
    names = ("all_gather_into_tensor", "reduce_scatter_tensor")
    in_bf16 = 2 * sum(facts["elements"][name] for name in names)
    return in_bf16 * (1 - 1 / processes)


def planned_bytes(folder, split, recompute=False, batch_size=4):
    """What plan.py says that a rank sends in a step of 4 sequences of 64 tokens."""
    places = {"gpu": None, "gpus": split.ranks_of_a_sequence * split.shards, "nodes": 1}
    args = SimpleNamespace(model_name=str(folder), seq_length=64, from_scratch=True, **places)
    how = split, recompute, batch_size, 4 // split.shards
    return plan.time_of_a_step(plan.load_model(args), args, *how)[0]


# Tensor parallelism

LARGE = {"vocab_size": 4096, "hidden_size": 32, "intermediate_size": 64}
LOSS = "    loss = F.cross_entropy("
GATHER_LOGITS = (LOSS, f"    logits.redistribute(placements=[Replicate()])\n{LOSS}")


@pytest.mark.parametrize(
    ("processes", "tied", "edits", "parts"),
    [
        (2, False, (), 2),
        pytest.param(4, True, (), 4, marks=slow),
        pytest.param(2, False, (GATHER_LOGITS,), 1, id="the count sees logits that are gathered"),
    ],
)
def test_no_rank_holds_the_logits_of_the_whole_vocabulary(tmp_path, processes, tied, edits, parts):
    """The largest tensor of a step is a part of them: B × T × V / n."""
    flags = micro_batch(tmp_path, **LARGE, tie_word_embeddings=tied)
    facts = watched(tmp_path, TENSOR, processes, *flags, edits=edits)
    assert facts["largest"] == 4 * 64 * 4096 / parts


@pytest.mark.parametrize(("processes", "layers"), [(2, 2), pytest.param(4, 3, marks=slow)])
def test_collectives_of_a_micro_batch(tmp_path, processes, layers):
    """4 L + 2 all-gathers and as many reduce-scatters of the hidden states, (B, T, H): for the
    attention and the MLP of each of L blocks, forward and backward, and for both ends."""
    flags = micro_batch(tmp_path, num_hidden_layers=layers)
    facts = watched(tmp_path, TENSOR, processes, *flags)
    calls, elements = facts["calls"], facts["elements"]
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        assert calls[name] == 4 * layers + 2
        assert elements[name] == (4 * layers + 2) * 4 * 64 * SIZES["hidden_size"]
    # Of the loss: largest logit, sum of exponentials, logit of the target, each (B, T). And the
    # gradients of the norms' weights.
    norms = 2 * layers + 1
    assert calls["all_reduce"] == 3 + norms
    assert elements["all_reduce"] == 3 * 4 * 64 + norms * SIZES["hidden_size"]
    split = plan.Split(TENSOR, tensor_size=processes)
    assert planned_bytes(flags[1], split)["group"] == sent_in_a_group(facts, processes)


@slow
def test_collectives_with_activation_checkpointing(tmp_path):
    """A block repeats its forward pass, but for the last reduce-scatter, which nothing needs."""
    flags = micro_batch(tmp_path, num_hidden_layers=3)
    plain = watched(tmp_path / "plain", TENSOR, 2, *flags)["calls"]
    facts = watched(tmp_path / "again", TENSOR, 2, *flags, AGAIN)
    again = facts["calls"]
    assert again["all_gather_into_tensor"] == plain["all_gather_into_tensor"] + 2 * 3
    assert again["reduce_scatter_tensor"] == plain["reduce_scatter_tensor"] + 3
    planned = planned_bytes(flags[1], plan.Split(TENSOR, tensor_size=2), recompute=True)
    assert planned["group"] == sent_in_a_group(facts, 2)


def test_attention_and_mlp_gather_their_input_once(tmp_path):
    """Without it each layer gathers for itself."""
    flags = micro_batch(tmp_path)
    gather = ("            styles[name] = GATHER_TOKENS[last_name]\n", "            pass\n")
    shared = watched(tmp_path / "shared", TENSOR, 2, *flags)
    separate = watched(tmp_path / "separate", TENSOR, 2, *flags, edits=[gather])
    name = "all_gather_into_tensor"
    assert separate["calls"][name] > 2 * shared["calls"][name]


PEAK_OF_SPLIT_LOGITS = """
import re, sys
from pathlib import Path
import torch
import torch._functorch.config
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from conftest import load

stage = load("07-tensor-parallel")
torch._functorch.config.enable_autograd_cache = False
dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())  # sends nothing
mesh = init_device_mesh("cpu", (8,))
tokens, vocabulary = 4096, 16000
weight, targets = torch.randn(vocabulary, 8).bfloat16(), torch.randint(vocabulary, (1, tokens))

def forward(hidden):
    logits = torch.nn.functional.linear(hidden, weight)
    return DTensor.from_local(logits, mesh, [Shard(2)])

def status(key):
    return 1024 * int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

compiled = sys.argv[1] == "compiled"
loss_fn = stage.sum_cross_entropy
loss_fn = torch.compile(loss_fn, dynamic=False) if compiled else loss_fn
for _ in range(2):  # the first one compiles
    hidden = torch.randn(1, tokens, 8).bfloat16().requires_grad_()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    with stage.loss_parallel():
        loss_fn(forward(hidden), targets).backward()
print((status("VmHWM") - before) / (tokens * vocabulary))
"""


def needs_a_compiler():
    if not shutil.which("g++"):
        pytest.skip("to compile on a CPU needs a compiler (Debian: apt-get install g++)")


@slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("how", "size"), [("compiled", 10), ("eager", 16)])
def test_bytes_of_a_split_logit(tmp_path, how, size):
    """At the peak, on a rank of 8: `plan.bytes_of_logits` has 10 for split logits."""
    needs_a_compiler()
    (tmp_path / "peak.py").write_text(PEAK_OF_SPLIT_LOGITS)
    command = [sys.executable, tmp_path / "peak.py", how]
    out = subprocess.check_output(command, env=os.environ | {"PYTHONPATH": TEST_MODULES}, text=True)
    assert float(out.split()[-1]) == pytest.approx(size, abs=0.5)


# Context parallelism


@pytest.mark.parametrize("more", [(), (AGAIN,)])
@pytest.mark.parametrize(("context_size", "layers"), [(2, 2), pytest.param(4, 3, marks=slow)])
def test_each_block_gathers_its_keys_and_values(tmp_path, context_size, layers, more):
    """Two all-gathers in the forward pass, and in the backward pass two reduce-scatters of their
    gradients. A block that repeats its forward pass also repeats the all-gathers."""
    flags = micro_batch(tmp_path, num_hidden_layers=layers)
    facts = watched(tmp_path, CONTEXT, context_size, *flags, "--dtype", "fp32", *more)
    head_size = SIZES["hidden_size"] // SIZES["num_attention_heads"]
    keys = 4 * 64 * SIZES["num_key_value_heads"] * head_size
    gathers = (4 if more else 2) * layers
    expected = {"all_gather_into_tensor": gathers, "reduce_scatter_tensor": 2 * layers}
    calls = {name: n for name, n in facts["calls"].items() if not name.startswith("_")}
    assert calls == expected
    assert [facts["elements"][name] for name in expected] == [n * keys for n in expected.values()]
    planned = planned_bytes(flags[1], plan.Split(CONTEXT, context_size=context_size), bool(more))
    assert planned["group"] == sent_in_a_group(facts, context_size)


def kept_by_a_block(folder, stage, processes, *more, edits=()):
    """Bytes that one more block keeps for the backward pass, on a rank."""
    saved = []
    for layers in (2, 3):
        flags = (*micro_batch(folder, num_hidden_layers=layers), *more)
        place = folder / f"{stage}-{processes}-{layers}"
        saved.append(watched(place, stage, processes, *flags, edits=edits)["saved"])
    return saved[1] - saved[0]


@slow
@pytest.mark.parametrize("context_size", [2, 4])
def test_a_rank_keeps_its_tokens_and_all_keys_and_values(tmp_path, context_size):
    """Of a block that keeps M bytes on one process: M / C, the keys and values of the other ranks,
    and the outputs of attention for its two chunks, which are kept again as one tensor. With
    activation checkpointing of its input 1 / C, and nothing else."""
    fp32 = ("--dtype", "fp32")
    whole = kept_by_a_block(tmp_path, FSDP, 1, *fp32)
    tokens, features = 4 * 64, SIZES["hidden_size"]
    keys = tokens * SIZES["num_key_value_heads"] * features // SIZES["num_attention_heads"]
    gathered = 2 * keys - 2 * keys // context_size
    outputs = tokens * features // context_size
    # A CPU also keeps a mask for the second chunk of rank 0, which sees all tokens. The first one
    # sees only itself, and needs none. A flash kernel on a GPU needs neither.
    mask = 64 // (2 * context_size) * 64
    kept = kept_by_a_block(tmp_path, CONTEXT, context_size, *fp32)
    assert kept == whole / context_size + 4 * (gathered + outputs + mask)
    kept = kept_by_a_block(tmp_path / "again", CONTEXT, context_size, *fp32, AGAIN)
    assert kept == 4 * tokens * features / context_size


@slow
@pytest.mark.parametrize("stage", [TENSOR, CONTEXT])
def test_a_compiled_block_keeps_what_plan_says(tmp_path, stage):
    """In bf16, to the byte. In a tensor group each rank has what attention and MLP have gathered,
    and of the others 1 / n: activations between layers are split by tokens, within by features."""
    needs_a_compiler()
    how = ("--dtype", "bf16", "--compile")
    kept = kept_by_a_block(tmp_path, stage, 2, *how, edits=UNWATCHED_STEP)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "3")
    group = {"tensor_size": 2} if stage == TENSOR else {"context_size": 2}
    mask = 0 if stage == TENSOR else 2 * (64 // 4 * 64)  # of a CPU, as above
    assert (kept - mask) / (4 * 64) == plan.bytes_of_a_block(config, **group)


# Expert parallelism

EXCHANGES = """
def watched(original):
    def exchange(output, rows, *args, **kwargs):
        sent.append([rows.numel(), output.numel(), rows.shape[1] == 128])
        return original(output, rows, *args, **kwargs)
    return exchange

sent = []
dist.all_to_all_single = watched(dist.all_to_all_single)


"""
SAY_SENT = f'        say("SENT" + json.dumps(sent))\n        sys.exit()\n{UPDATE}'


@pytest.mark.parametrize(
    ("processes", "more", "times"), [(2, (), 4), pytest.param(4, (AGAIN,), 6, marks=slow)]
)
def test_each_pair_of_a_token_and_an_expert_travels_there_and_back(
    tmp_path, mixture, processes, more, times
):
    """In each of L blocks: K rows for a token, once there and once back, and so do their gradients.
    A block that repeats its forward pass repeats both exchanges. Two numbers for each expert of a
    block say how many rows there are."""
    path = mutant(tmp_path, EXPERT, (BEGIN, EXCHANGES + BEGIN), (UPDATE, SAY_SENT))
    flags = ("-s", 64, "--global-batch-size", 4 * processes, "-b", 4, "--max-steps", 1)
    flags += ("--eval-sequences", 1, "--expert-size", processes, *mixture, *more)
    out = run(EXPERT, processes, *flags, path=path).out
    sent = json.loads(out.split("SENT")[1].splitlines()[0])
    hidden_rows = [entry for entry in sent if entry[2]]
    layers, hidden_size, tokens, choices = 3, 128, 4 * 64, 2
    assert len(hidden_rows) == times * layers
    own = tokens * choices * hidden_size  # what this rank sends there, and gets back
    assert sum(entry[0] == own for entry in hidden_rows) >= times // 2 * layers
    assert sum(entry[1] == own for entry in hidden_rows) >= times // 2 * layers
    assert len(sent) - len(hidden_rows) == (times - 2) // 2 * layers


# Pipelines


def written_by(what, folder, num_stages, micro_batches, schedule):
    """Runs one pipeline by tests/support/pipeline_worker.py: what each rank has written."""
    model = save_config(folder / "m", "llama", num_hidden_layers=4)
    flags = ("-m", model, "--from-scratch", "-s", 32, "-b", 1, "--global-batch-size", micro_batches)
    flags += ("--max-steps", 2, "--eval-sequences", 2, "--schedule", schedule)
    words = (what, folder, *flags, "--stages", num_stages)
    worker = SUPPORT / "pipeline_worker.py"
    result = finish(fork(worker, num_stages, *words, PYTHONPATH=TEST_MODULES))
    assert result.returncode == 0, result.err
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_stages)]


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=slow)])
def test_activations_that_a_pipeline_stage_keeps(tmp_path, schedule):
    """With 1F1B those of S − s micro-batches on pipeline stage s, with GPipe those of all."""
    num_stages, micro_batches = 4, 6
    written = written_by("kept", tmp_path, num_stages, micro_batches, schedule)
    for pipeline_stage, (first, most) in enumerate(written):
        number = num_stages - pipeline_stage if schedule == "1f1b" else micro_batches
        assert most / first == pytest.approx(number, rel=0.02)


@pytest.mark.parametrize(
    ("micro_batches", "schedule"),
    [(6, "1f1b"), pytest.param(6, "gpipe", marks=slow), pytest.param(4, "1f1b", marks=slow)],
)
def test_the_bubble_is_that_of_the_formula(tmp_path, micro_batches, schedule):
    """By a virtual clock, which pipeline stages exchange with their tensors: exactly."""
    num_stages = 4
    written = written_by("virtual", tmp_path, num_stages, micro_batches, schedule)
    for step in zip(*written, strict=True):
        ends, busy = zip(*step, strict=True)
        assert set(busy) == {3 * micro_batches}
        assert max(ends) == 3 * (micro_batches + num_stages - 1)


COUNT = """
SENT = [0]
batch_isend_irecv = dist.batch_isend_irecv
def counted(operations):
    for operation in operations:
        if operation.op is dist.isend:
            SENT[0] += operation.tensor.nbytes
    return batch_isend_irecv(operations)
dist.batch_isend_irecv = counted

"""


def test_bytes_between_pipeline_stages(tmp_path):
    """B T h elements for each micro-batch, in each direction. And once in a step the gradient of a
    weight that the first pipeline stage and the last one share."""
    place = "        # The gradient of a weight that two pipeline stages have"
    # `print` would write each word by itself, and those of several processes would mix.
    write = 'sys.stdout.write(f"SENT {step} {stage.index} {SENT[0]};")'
    note = f"        {write}\n        SENT[0] = 0\n"
    path = mutant(tmp_path, PIPELINE, (BEGIN, COUNT + "\n" + BEGIN), (place, note + place))
    model = save_config(tmp_path / "m", "llama", num_hidden_layers=4, tie_word_embeddings=True)
    flags = (*SMALL, "--max-steps", 3, "--dtype", "fp32", "-m", model, "--from-scratch")
    flags += ("-b", 2, "--stages", 4)
    found = re.findall(r"SENT (\d+) (\d+) (\d+);", run(PIPELINE, 4, *flags, path=path).out)
    hidden_states = 2 * 64 * SIZES["hidden_size"] * 4
    sent = {int(index): int(count) for step, index, count in found if step == "3"}
    one_way = 4 * hidden_states
    tied = SIZES["vocab_size"] * SIZES["hidden_size"] * 4  # of the step before
    assert sent == {0: one_way + tied, 1: 2 * one_way, 2: 2 * one_way, 3: one_way + tied}

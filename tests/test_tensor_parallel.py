"""Stage 07: tensor parallelism computes what one process does, and holds a part of everything."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import (
    ROOT,
    SMALL,
    assert_same_curve,
    exact,
    metrics,
    mutant,
    run,
    save_tokenizer,
)
from transformers import AutoModelForCausalLM

import plan

STAGE = "07-tensor-parallel"
FIFTY = ("--max-steps", "50", "--dtype", "fp32", *SMALL)
FEW = (*SMALL, "--max-steps", "3", "--dtype", "fp32")
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
# Architectures whose plan this stage can carry out. Gemma 2 has norms behind attention and MLP,
# Qwen 3 norms of heads, Starcoder 2 biases everywhere, Cohere one norm for attention and MLP.
ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "granite", "cohere"]
ARCHITECTURES += ["starcoder2", "phi", "olmo", "gpt_neox", "nemotron", "arcee", "seed_oss"]
ARCHITECTURES += ["exaone4", "smollm3", "gemma"]


def save_config(folder, architecture, **sizes):
    sizes = SIZES | sizes
    config = transformers.AutoConfig.for_model(architecture, **sizes)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = 0
    config.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


# Equal curves


@pytest.mark.law1
@pytest.mark.slow
def test_fifty_steps(curve):
    """A state of 1/W, as everything is split, but for the norms."""
    one = curve("01-single-gpu", 1, *FIFTY)
    processes = 4
    split = curve(STAGE, processes, *FIFTY, "--tensor-size", 2)
    assert_same_curve(one, split, range(1, 51))
    assert split[50]["eval/loss"] == pytest.approx(one[50]["eval/loss"], rel=1e-5)
    whole = one[50]["memory/state_gb"]
    assert split[50]["memory/state_gb"] == pytest.approx(whole / processes, rel=0.05)


CASES = {
    "masked labels": ("--max-steps", "8", "-b", "2"),
    "a batch that the groups do not divide": ("--global-batch-size", "7", "-b", "3"),
    "a group that has no sequence": ("--global-batch-size", "1"),
    "tokens that the ranks do not divide": ("-s", "31", "-b", "3", "--activation-checkpointing"),
    "gathered once": ("--no-reshard-after-forward", "-b", "1"),
}


@pytest.mark.law1
@pytest.mark.parametrize(
    "case", [c if c == "masked labels" else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_the_same_curve_in_each_case(curve, masked_data, case):
    """On two groups of two ranks."""
    flags = ("--max-steps", "6", *SMALL, "--dtype", "fp32", *CASES[case], "--lr", "2e-3")
    if case == "masked labels":
        flags += ("-d", masked_data)
    one = curve("01-single-gpu", 1, *(f for f in flags if f != "--no-reshard-after-forward"))
    split = curve(STAGE, 4, *flags, "--tensor-size", 2)
    assert_same_curve(one, split, one)


@pytest.mark.law1
@pytest.mark.slow
def test_compiled_as_eager(curve, tmp_path):
    """Each rank has another number of the 31 tokens. With PyTorch's cache a rank would compute with
    the code of another from the second run on, and train something else (pytorch#188390)."""
    model = save_config(tmp_path / "m", "llama", num_hidden_layers=1, max_position_embeddings=256)
    flags = (*SMALL, "-b", 8, "--max-steps", 3, "-s", 31, "--dtype", "fp32", "--tensor-size", 2)
    flags += ("-m", model, "--from-scratch")
    eager = curve(STAGE, 2, *flags)
    for name in ("first", "second"):
        named = ("-e", name, "--save-dir", tmp_path, "--log-freq", 1, "--compile")
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
        run(STAGE, 2, *flags, *named, **cache)
        compiled = metrics(tmp_path / name)
        assert_same_curve(eager, compiled, eager)
        assert compiled[3]["eval/loss"] == pytest.approx(eager[3]["eval/loss"], rel=1e-5)


# Gradients of each parameter

DUMP = """
        import pickle
        full = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            gradient = parameter.grad
            full[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        if int(__import__("os").environ.get("RANK", 0)) == 0:
            Path("{TO}").write_bytes(pickle.dumps(full))
        sys.exit()
"""
# Behind the backward passes of a step.
PLACE = "        # Update. The gradients are clipped"
# A new model's biases are zero, which hides mistakes.
NEW_MODEL = "        return transformers.AutoModelForCausalLM.from_config(config, **options)\n"
BIASES = """        model = transformers.AutoModelForCausalLM.from_config(config, **options)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.1)
        return model
"""


def gradients(folder, stage, processes, *flags, place=PLACE):
    """A stage's gradients of the first step, by name, before they are clipped.

    They are taken before the line `place`, which is indented as much as the update."""
    dump = (place, DUMP.replace("{TO}", str(folder / f"{stage}.pickle")) + place)
    run(stage, processes, *flags, path=mutant(folder / stage, stage, dump, (NEW_MODEL, BIASES)))
    return pickle.loads((folder / f"{stage}.pickle").read_bytes())


@pytest.mark.law1
@pytest.mark.parametrize(
    ("architecture", "tied", "processes"),
    [
        ("llama", True, 4),
        pytest.param("qwen3", False, 4, marks=pytest.mark.slow),
        # Each architecture, one with tied embeddings, the next without.
        *[
            pytest.param(name, i % 2 == 1, 2, marks=pytest.mark.slow)
            for i, name in enumerate(ARCHITECTURES)
        ],
    ],
)
def test_every_gradient_is_that_of_one_process(tmp_path, architecture, tied, processes):
    """Also of the biases, and of the norms, whose gradients are sums over the ranks."""
    model = save_config(tmp_path / "m", architecture, tie_word_embeddings=tied)
    flags = ("-s", "32", "--global-batch-size", "4", "-b", "2", "--max-steps", "1")
    flags += ("-m", model, "--from-scratch")
    one = gradients(tmp_path, "01-single-gpu", 1, *flags, "--eval-sequences", 2)
    flags += ("--eval-sequences", 2, "--tensor-size", 2)
    split = gradients(tmp_path, STAGE, processes, *flags)
    assert split.keys() == one.keys()
    assert any("norm" in name for name in one) or architecture == "olmo"  # it has no weights there
    largest = max(gradient.norm() for gradient in one.values())
    for name, gradient in one.items():
        error = (split[name] - gradient).norm()
        assert error <= 2e-5 * gradient.norm() + 1e-7 * largest, name


MUTANTS = {
    "ranks of a group read different sequences": [
        (
            "dist.get_rank(group), dist.get_world_size(group)",
            "dist.get_rank(), dist.get_world_size()",
        )
    ],
    "embeddings untied": [("    model.tie_weights()\n\n\ndef share", "\n\ndef share")],
    "groups not added up": [("loss * num_shares / num_targets", "loss / num_targets")],
    "loss not reduced": [
        ("            dist.all_reduce(step_loss, group=data_group)", "            pass")
    ],
}
OF_SEVERAL_GROUPS = ("groups not added up", "loss not reduced")


@pytest.mark.law1
@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_line_is_noticed(curve, tmp_path, name):
    folder = save_config(tmp_path / "m", "llama", tie_word_embeddings=True)
    flags = ("--max-steps", "6", *SMALL, "--dtype", "fp32", "--lr", "2e-3")
    flags += ("-m", folder, "--from-scratch")
    one = curve("01-single-gpu", 1, *flags)
    path = mutant(tmp_path / "mutant", STAGE, *MUTANTS[name])
    named = ("-e", "a", "--save-dir", tmp_path, "--log-freq", 1, "--tensor-size", 2)
    processes = 4 if name in OF_SEVERAL_GROUPS else 2
    run(STAGE, processes, *flags, *named, path=path)
    with pytest.raises(AssertionError):
        assert_same_curve(one, metrics(tmp_path / "a"), one)


# What a rank holds and sends

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
SAY = """
        watch.__exit__(None, None, None)
        facts = {"largest": Watch.largest, "calls": Watch.calls, "elements": Watch.elements}
        facts |= {"bytes": Watch.bytes, "saved": sum(saved.values())}
        say("FACTS" + json.dumps(facts))
        sys.exit()
"""


def watched(folder, processes, *flags, edits=()):
    """What one step of stage 07 holds and sends, as rank 0 sees it."""
    # Stage 01 has the same step, so with one process its numbers are those of --tensor-size 1.
    return watched_stage(folder, STAGE, processes, "--tensor-size", processes, *flags, edits=edits)


def watched_stage(folder, stage, processes, *flags, edits=()):
    """The same of another stage."""
    edits = [
        (BEGIN, WATCH + "\n" + BEGIN),
        (FORWARD, HOOKED),
        (STEP, STEP + "        watch = Watch()\n        watch.__enter__()\n"),
        (PLACE, SAY + PLACE),
        *edits,
    ]
    path = mutant(folder, stage, *edits)
    flags = ("--max-steps", 1, "--eval-sequences", 2, *flags)
    out = run(stage, processes, *flags, path=path).out
    return json.loads(out.split("FACTS")[1].splitlines()[0])


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


@pytest.mark.parametrize(
    ("processes", "tied"), [(2, False), pytest.param(4, True, marks=pytest.mark.slow)]
)
def test_no_rank_holds_the_logits_of_the_whole_vocabulary(tmp_path, processes, tied):
    """The largest tensor of a step is a part of them: B × T × V / n."""
    sizes = {"vocab_size": 4096, "hidden_size": 32, "intermediate_size": 64}
    folder = save_config(tmp_path / "m", "llama", **sizes, tie_word_embeddings=tied)
    facts = watched(
        tmp_path, processes, "-m", folder, "--from-scratch", *("-s", 64, "--global-batch-size", 4)
    )
    assert facts["largest"] == 4 * 64 * 4096 / processes


def test_the_count_sees_logits_that_are_gathered(tmp_path):
    sizes = {"vocab_size": 4096, "hidden_size": 32, "intermediate_size": 64}
    folder = save_config(tmp_path / "m", "llama", **sizes)
    place = "    loss = F.cross_entropy("
    gather = (place, f"    logits.redistribute(placements=[Replicate()])\n{place}")
    flags = ("-m", folder, "--from-scratch", "-s", 64, "--global-batch-size", 4)
    facts = watched(tmp_path, 2, *flags, edits=[gather])
    assert facts["largest"] >= 4 * 64 * 4096


@pytest.mark.parametrize(
    ("processes", "layers"), [(2, 2), pytest.param(4, 3, marks=pytest.mark.slow)]
)
def test_collectives_of_a_micro_batch(tmp_path, processes, layers):
    """4 L + 2 all-gathers and as many reduce-scatters of the hidden states, (B, T, H): for the
    attention and the MLP of each of L blocks, forward and backward, and for both ends."""
    folder = save_config(tmp_path / "m", "llama", num_hidden_layers=layers)
    flags = ("-m", folder, "--from-scratch", "-s", 64, "--global-batch-size", 4, "-b", 4)
    facts = watched(tmp_path, processes, *flags)
    calls, elements = facts["calls"], facts["elements"]
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        assert calls[name] == 4 * layers + 2
        assert elements[name] == (4 * layers + 2) * 4 * 64 * SIZES["hidden_size"]
    # Of the loss: largest logit, sum of exponentials, logit of the target, each (B, T). And the
    # gradients of the norms' weights.
    norms = 2 * layers + 1
    assert calls["all_reduce"] == 3 + norms
    assert elements["all_reduce"] == 3 * 4 * 64 + norms * SIZES["hidden_size"]
    split = plan.Split(STAGE, tensor_size=processes)
    assert planned_bytes(folder, split)["group"] == sent_in_a_group(facts, processes)


@pytest.mark.slow
def test_collectives_with_activation_checkpointing(tmp_path):
    """A block repeats its forward pass, but for the last reduce-scatter, which nothing needs."""
    folder = save_config(tmp_path / "m", "llama", num_hidden_layers=3)
    flags = ("-m", folder, "--from-scratch", "-s", 64, "--global-batch-size", 4, "-b", 4)
    plain = watched(tmp_path / "plain", 2, *flags)["calls"]
    facts = watched(tmp_path / "again", 2, *flags, "--activation-checkpointing")
    again = facts["calls"]
    assert again["all_gather_into_tensor"] == plain["all_gather_into_tensor"] + 2 * 3
    assert again["reduce_scatter_tensor"] == plain["reduce_scatter_tensor"] + 3
    planned = planned_bytes(folder, plan.Split(STAGE, tensor_size=2), recompute=True)
    assert planned["group"] == sent_in_a_group(facts, 2)


def test_attention_and_mlp_gather_their_input_once(tmp_path):
    """Without it each layer gathers for itself."""
    folder = save_config(tmp_path / "m", "llama")
    flags = ("-m", folder, "--from-scratch", "-s", 64, "--global-batch-size", 4, "-b", 4)
    gather = "            styles[name] = GATHER_TOKENS[last_name]\n"
    shared = watched(tmp_path / "shared", 2, *flags)
    separate = watched(tmp_path / "separate", 2, *flags, edits=[(gather, "            pass\n")])
    name = "all_gather_into_tensor"
    assert separate["calls"][name] > 2 * shared["calls"][name]


@pytest.mark.slow  # compiles
def test_activations_between_layers_are_split_by_tokens_within_by_features(tmp_path):
    """Each rank has what attention and MLP have gathered, and of the others 1 / n. Measured as what
    one more compiled block keeps for the backward pass, to the byte."""
    if not shutil.which("g++"):
        pytest.skip("to compile on a CPU needs a compiler (Debian: apt-get install g++)")
    processes, saved = 2, []
    for layers in (2, 3):
        folder = save_config(tmp_path / f"m{layers}", "llama", num_hidden_layers=layers)
        flags = ("-m", folder, "--from-scratch", "-s", 64, "--global-batch-size", 4, "-b", 4)
        flags += ("--dtype", "bf16", "--compile")
        # Nothing is compiled while a mode watches every operation.
        edits = [("        watch.__enter__()\n", "")]
        edits += [("        watch.__exit__(None, None, None)\n", "")]
        facts = watched(tmp_path / f"{layers}", processes, *flags, edits=edits)
        saved.append(facts["saved"])
    config = transformers.AutoConfig.from_pretrained(folder)
    assert (saved[1] - saved[0]) / (4 * 64) == plan.bytes_of_a_block(config, processes)


# Checkpoints

STEADY = (*SMALL, "--log-freq", "1", "--dtype", "fp32", "--lr-scheduler", "constant")
STEADY += ("--warmup-steps", "5")
WALK = [
    ("01-single-gpu", 1, ()),
    (STAGE, 4, ("--tensor-size", 2)),
    (STAGE, 4, ("--tensor-size", 4)),
    ("02-ddp", 2, ()),
    (STAGE, 2, ("--tensor-size", 1)),
    (STAGE, 2, ("--tensor-size", 2)),
    ("01-single-gpu", 1, ()),
]


@pytest.mark.law3
@pytest.mark.slow
def test_a_run_changes_its_tensor_size(curve, tmp_path):
    """Three steps on each, with tied embeddings of 1,025 tokens, which are not divided equally. The
    curve is that of stage 01, and so is the model at the end."""
    sizes = {"vocab_size": 1025, "tie_word_embeddings": True}
    model = ("-m", save_config(tmp_path / "m", "llama", **sizes), "--from-scratch")
    named = ("-e", "a", "--save-dir", tmp_path)
    for number, (stage, processes, more) in enumerate(WALK):
        flags = (*exact(stage, processes), *STEADY, *model, *named, *more)
        out = run(stage, processes, *flags, "--max-steps", 3 + 3 * number).out
        assert (f"resumed from {tmp_path}/a/step-{3 * number:08d}" in out) == (number > 0)
    resumed = metrics(tmp_path / "a")
    assert list(resumed) == list(range(1, 3 * len(WALK) + 1))
    whole = curve("01-single-gpu", 1, *STEADY, *model, "--max-steps", 3 * len(WALK))
    assert_same_curve(whole, resumed, resumed)


def bytes_before_sharding(folder, *edits):
    """Of parameters that a rank has on its device between `split_layers` and FSDP, the most."""
    probe = """    split_layers(model, mesh["tensor"])
    parts = [p.to_local() for p in model.parameters() if not p.is_meta]
    print("bytes", sum(part.nbytes for part in parts))
"""
    path = mutant(folder, STAGE, ('    split_layers(model, mesh["tensor"])\n', probe), *edits)
    lines = run(STAGE, 2, *SMALL, "--max-steps", 1, path=path).out.splitlines()
    found = [int(line.split()[1]) for line in lines if line.startswith("bytes ")]
    assert len(found) == 2
    return max(found)


@pytest.mark.slow
def test_no_rank_has_its_part_of_all_layers_before_they_are_sharded(tmp_path):
    """Rank 0 has loaded the weights. Of 8 billion parameters in two parts it would have 16 GB."""
    assert bytes_before_sharding(tmp_path / "a") == 0
    # The count sees the halves of the matrices.
    assert bytes_before_sharding(tmp_path / "b", ('    model.to("meta")\n', "")) > 1_000_000


@pytest.mark.law3
@pytest.mark.slow
def test_the_export_is_the_trained_model(tmp_path):
    """`from_pretrained` opens it, and its logits are those of the same run on one process."""
    tokens = torch.arange(32)[None] * 7 % 1024
    logits = {}
    # AdamW divides by the size of a gradient, so it turns rounding into differences of the learning
    # rate where a gradient is nearly 0.
    flags = (*FEW, "--lr", "2e-4", "--save-dir", tmp_path)
    for stage, processes, more in (("01-single-gpu", 1, ()), (STAGE, 2, ("--tensor-size", 2))):
        run(stage, processes, *flags, "-e", stage, *more)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / stage / "final_model")
        logits[stage] = model(tokens).logits
    assert torch.allclose(logits["01-single-gpu"], logits[STAGE], atol=1e-5)


@pytest.mark.law1
def test_pretrained_weights_reach_the_rank_that_has_them(curve, tmp_path):
    """bf16 weights of a tied Qwen 3, as a hub has them."""
    config = transformers.AutoConfig.from_pretrained(
        save_config(tmp_path / "c", "qwen3", vocab_size=1025, tie_word_embeddings=True)
    )
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "m")
    save_tokenizer(tmp_path / "m")
    one = curve("01-single-gpu", 1, *FEW, "-m", tmp_path / "m")
    split = curve(STAGE, 2, *FEW, "-m", tmp_path / "m", "--tensor-size", 2)
    assert_same_curve(one, split, range(1, 4))


# fp16

OVERFLOW = """        if step == 2 and dist.get_rank() == 1:
            next(model.parameters()).grad.to_local().view(-1)[0] = torch.inf
        def checksum():
            return sum(p.to_local().double().sum().item() for p in model.parameters())
        before = checksum()
        scaler.unscale_(optimizer)
"""
OVERFLOWED = """        scaler.update()
        changed = [None] * dist.get_world_size()
        dist.all_gather_object(changed, checksum() != before)
        say(f"CHANGED {step} {changed} {scaler.get_scale()}")
"""


@pytest.mark.slow
def test_an_overflow_of_fp16_on_one_rank_skips_the_step_on_all(tmp_path):
    processes, tensor_size = 2, 2
    edits = [
        ("        scaler.unscale_(optimizer)\n", OVERFLOW),
        ("        scaler.update()\n", OVERFLOWED),
        ("GradScaler(device.type, ", "GradScaler(device.type, init_scale=256.0, "),
    ]
    path = mutant(tmp_path, STAGE, *edits)
    flags = (*SMALL, "--max-steps", "3", "--dtype", "fp16", "--tensor-size", tensor_size)
    out = run(STAGE, processes, *flags, path=path).out
    lines = [line.split("CHANGED ")[1] for line in out.splitlines() if "CHANGED" in line]
    every = [[True] * processes, [False] * processes, [True] * processes]
    assert lines == [f"{i + 1} {every[i]} {scale}" for i, scale in enumerate((256.0, 128.0, 128.0))]


# Bad input

REFUSED = [
    ("gpt2", {}, "--model-name: transformers has no plan to split gpt2, use 03-fsdp"),
    ("llama", {"num_key_value_heads": 1}, "--tensor-size 2: must divide the 1 heads of keys and"),
    ("olmo2", {}, "colwise_gather_output, the plan for model.layers.0.self_attn.q_proj"),
]


@pytest.mark.parametrize(("architecture", "sizes", "message"), REFUSED)
def test_what_cannot_be_split_ends_in_one_line(tmp_path, architecture, sizes, message):
    folder = save_config(tmp_path / "m", architecture, **sizes)
    result = run(STAGE, 2, *FEW, "-m", folder, "--from-scratch", check=False)
    assert result.returncode != 0
    [line] = result.errors
    assert message in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "sizes"), [("llama", {"intermediate_size": 127}), ("mixtral", {})]
)
def test_other_models_that_cannot_be_split_train_nothing_wrong(tmp_path, architecture, sizes):
    """Features that cannot be divided equally, and layers that the plan leaves out: an error of
    PyTorch's, or ours, before the first step."""
    folder = save_config(tmp_path / "m", architecture, **sizes)
    result = run(STAGE, 2, *FEW, "-m", folder, "--from-scratch", check=False)
    assert result.returncode != 0
    assert "step     1/" not in result.out


def test_processes_that_do_not_form_whole_groups():
    result = run(STAGE, 2, *FEW, "--tensor-size", 3, check=False)
    assert result.errors == ["train-llm.py: error: --tensor-size 3: does not divide 2 processes"]


# Memory of split logits

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


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("how", "size"), [("compiled", 10), ("eager", 16)])
def test_bytes_of_a_split_logit(tmp_path, how, size):
    """At the peak, on a rank of 8: `plan.bytes_of_logits` has 10 for split logits."""
    if how == "compiled" and not shutil.which("g++"):
        pytest.skip("to compile on a CPU needs a compiler (Debian: apt-get install g++)")
    (tmp_path / "peak.py").write_text(PEAK_OF_SPLIT_LOGITS)
    command = [sys.executable, tmp_path / "peak.py", how]
    places = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "tests" / "support")])
    out = subprocess.check_output(command, env=os.environ | {"PYTHONPATH": places}, text=True)
    assert float(out.split()[-1]) == pytest.approx(size, abs=0.5)

"""Stage 10: ranks that divide the experts of a mixture compute what one process does."""

import json
from types import SimpleNamespace

import numpy
import pytest
import torch
import transformers
from conftest import (
    SMALL,
    assert_same_curve,
    default_sequences,
    exact,
    load,
    metrics,
    mutant,
    run,
    save_mixture,
    save_tokenizer,
)
from safetensors.torch import load_file
from test_tensor_parallel import OVERFLOW, OVERFLOWED, gradients, save_config
from transformers import AutoModelForCausalLM

STAGE = "10-expert-parallel"
FIFTY = ("--max-steps", "50", "--dtype", "fp32", *SMALL)
SIX = ("--max-steps", "6", "--dtype", "fp32", "--lr", "2e-3", *SMALL)
FEW = (*SMALL, "--max-steps", "3", "--dtype", "fp32")
# AdamW divides a gradient by its size, so a wrong factor shows in the norm and not in the loss.
NORM_BOUND = 1e-5


def assert_same(one, split):
    """Law 1, with the bound of the loss for the norm of the gradients too."""
    assert_same_curve(one, split, one, rel_norm=NORM_BOUND)


def trained(folder, stage, processes, *flags, edits=(), check=True):
    """The metrics of a copy of a stage with `edits`, and how the run ended."""
    path = mutant(folder / stage, stage, *edits)
    named = ("-e", "a", "--save-dir", folder / stage, "--log-freq", 1)
    result = run(stage, processes, *flags, *named, path=path, check=check)
    log = folder / stage / "a" / "metrics.jsonl"
    return (metrics(log.parent) if log.exists() else {}), result


# Equal curves

# In double precision routes do not flip. The grouped products of experts are not there for it.
DOUBLE = [
    ('"fp32": torch.float32}', '"fp32": torch.float64}'),
    (
        '"dtype": torch.float32}',
        '"dtype": torch.float64, "experts_implementation": "eager"}',
    ),
    ("logits.float().flatten(0, 1)", "logits.flatten(0, 1)"),
]
ON_ONE = [("enabled=dtype != torch.float32", "enabled=False")]
ON_SEVERAL = [("reduce_dtype=torch.float32", "reduce_dtype=torch.float64")]


@pytest.mark.law1
@pytest.mark.slow
def test_fifty_steps_are_those_of_one_process(mixture, tmp_path):
    """In double precision, since in fp32 a route may flip. A state of 1/W, as in stage 03."""
    processes, flags = 4, (*FIFTY, *mixture)
    one, _ = trained(tmp_path / "one", "01-single-gpu", 1, *flags, edits=DOUBLE + ON_ONE)
    flags += ("--expert-size", 2)
    split, _ = trained(tmp_path / "split", STAGE, processes, *flags, edits=DOUBLE + ON_SEVERAL)
    assert list(split) == list(range(1, 51))
    # The loss is added up and logged in fp32, the norm is not.
    assert_same_curve(one, split, one, rel_loss=1e-6, rel_norm=1e-10)
    whole = one[50]["memory/state_gb"]
    assert split[50]["memory/state_gb"] == pytest.approx(whole / processes, rel=0.01)


# Processes, flags, those that only this stage has, and sizes of the model.
CASES = {
    "masked labels": (2, ("-b", "2"), (), {}),
    "masked labels in shard groups of two": (4, ("-b", "1"), (), {}),
    "a batch that the ranks do not divide": (4, ("--global-batch-size", "7", "-b", "3"), (), {}),
    "a rank that has no sequence": (4, ("--global-batch-size", "1"), (), {}),
    "activation checkpointing": (2, ("--activation-checkpointing", "-b", "1"), (), {}),
    "gathered once": (
        4,
        ("-b", "1", "--activation-checkpointing", "--eval-freq", "2"),
        ("--no-reshard-after-forward",),
        {},
    ),
    "a single process": (1, (), ("--expert-size", 1), {}),
    "shards that are not even": (3, (), ("--expert-size", 1), {}),
    "all ranks in a row": (4, ("--eval-freq", "2"), ("--expert-size", 4), {}),
    "three experts for a shard group of two": (4, (), (), {"num_local_experts": 6}),
    "three ranks in a row": (3, ("-b", "2"), ("--expert-size", 3), {"num_local_experts": 6}),
    "every expert for each token": (4, ("--max-steps", "12"), (), {"num_experts_per_tok": 8}),
}


@pytest.mark.law1
@pytest.mark.parametrize(
    "case", [c if c == "masked labels" else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_the_same_curve_in_each_case(curve, masked_data, mixture, tmp_path, case):
    """In rows of two ranks, if the case does not say otherwise."""
    processes, more, own, sizes = CASES[case]
    if sizes:
        mixture = ("-m", save_mixture(tmp_path / "m", **sizes), "--from-scratch")
    flags = (*SIX, *mixture, *more)
    if case.startswith("masked labels"):
        flags += ("-d", masked_data)
    one = curve("01-single-gpu", 1, *flags)
    assert_same(one, curve(STAGE, processes, *flags, "--expert-size", 2, *own))


@pytest.mark.parametrize(
    ("num_ranks", "shape", "dimension"),
    [(1, (3, 8), 0), (2, (4, 8), 0), (2, (3, 8), 1), (4, (2, 8, 5), 1), (2, (3, 5), 0)],
)
def test_shards_are_even_where_a_dimension_can_be_divided(num_ranks, shape, dimension):
    """Three experts on two ranks are cut in the other dimension. Cut by experts, one of the ranks
    would have twice as much as the other."""
    parameter = SimpleNamespace(to_local=lambda: torch.empty(shape))
    assert load(STAGE).choose_dimension(num_ranks, parameter).dim == dimension


@pytest.mark.law1
@pytest.mark.slow
def test_compiled_as_eager(curve, masked_data, tmp_path):
    """Each token has all experts, because in one with two nearly equal ones a route may flip."""
    folder = save_mixture(tmp_path / "m", num_experts_per_tok=8)
    flags = (*SIX, "--activation-checkpointing", "-b", "2", "--eval-freq", "2")
    flags += ("-d", masked_data, "-m", folder, "--from-scratch")
    one = curve("01-single-gpu", 1, *flags)
    flags += ("--no-reshard-after-forward",)
    assert_same(one, curve(STAGE, 2, *flags))
    assert_same_curve(one, curve(STAGE, 2, *flags, "--compile"), one)


@pytest.mark.law1
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_smaller_type_has_almost_the_curve_of_fp32(curve, mixture, dtype):
    one = curve("01-single-gpu", 1, *SIX, *mixture)
    small = curve(STAGE, 2, *SIX, *mixture, "--dtype", dtype)
    assert_same_curve(one, small, one, rel_loss=1e-3, rel_norm=0.1)


@pytest.mark.slow
def test_a_parameter_without_a_gradient_is_left_alone(curve, tmp_path):
    """Law 1 for models that freeze a parameter: that of the router's correction in ERNIE 4.5."""
    sizes = {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32}
    model = save_config(tmp_path / "m", "ernie4_5_moe", **sizes, moe_layer_start_index=0)
    flags = (*FEW, "-m", model, "--from-scratch")
    one = curve("01-single-gpu", 1, *flags)
    assert_same(one, curve(STAGE, 2, *flags))


@pytest.mark.slow
@pytest.mark.parametrize("expert_size", [1, 2])
def test_in_bf16_the_first_step_is_that_of_stage_03(curve, mixture, expert_size):
    """Law 1 in a smaller type: what is computed in fp32 in stage 03 is so here, such as the sum of
    the outputs of experts. With router weights in bf16 the norm would differ by 2e-4."""
    bf16 = (*SIX, *mixture, "--dtype", "bf16")
    other = curve("03-fsdp", 2, *bf16)[1]
    split = curve(STAGE, 2, *bf16, "--expert-size", expert_size)[1]
    for name, bound in (("train/loss", 1e-6), ("train/grad_norm", NORM_BOUND)):
        assert split[name] == pytest.approx(other[name], rel=bound)


# Gradients of each parameter

# Where the gradients of the experts have been divided.
DIVIDED = "        # Each element of a gradient is on one rank only."
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK = {
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "num_key_value_heads": 8,
}
NEMOTRON = {
    "layers_block_type": ["mamba", "moe", "attention", "moe"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
    "head_dim": 8,
}
# Qwen 3 has norms of heads, OLMoE does not normalise the weights, GPT-OSS has biases and transposed
# matrices, DeepSeek and Qwen 2 shared experts, DeepSeek also a dense block, Nemotron no gates.
ARCHITECTURES = {
    "mixtral": {},
    "qwen3_moe": MOE,
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 32},
    "olmoe": MOE,
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8},
    "deepseek_v3": DEEPSEEK,
    "nemotron_h": NEMOTRON,
}


@pytest.mark.law1
@pytest.mark.parametrize(
    ("architecture", "processes", "expert_size"),
    [
        pytest.param(name, *ways, marks=() if (name, *ways) == ("qwen3_moe", 2, 2) else slow)
        for slow in [pytest.mark.slow]
        for name in ARCHITECTURES
        for ways in [(2, 2), (4, 2)]
    ],
)
def test_every_gradient_is_that_of_one_process(tmp_path, architecture, processes, expert_size):
    """Those of experts, which are on a mesh of two dimensions, as those of all others."""
    model = save_config(tmp_path / "m", architecture, **ARCHITECTURES[architecture])
    flags = ("-s", "32", "--global-batch-size", "4", "-b", "1", "--max-steps", "1")
    flags += ("-m", model, "--from-scratch", "--eval-sequences", 2)
    one = gradients(tmp_path, "01-single-gpu", 1, *flags)
    more = ("--expert-size", expert_size)
    split = gradients(tmp_path, STAGE, processes, *flags, *more, place=DIVIDED)
    assert split.keys() == one.keys()
    assert any("expert" in name for name in one)
    largest = max(gradient.norm() for gradient in one.values() if gradient is not None)
    for name, gradient in one.items():
        if gradient is None:
            assert split[name] is None or split[name].count_nonzero() == 0, name
            continue
        error = (split[name] - gradient).norm()
        assert error <= 2e-5 * gradient.norm() + 1e-7 * largest, name


# Loads that are far from even

# The default computes all rows of a rank in one product. "eager" computes one expert after another,
# and if a rank had no row, nothing in its backward pass would wait for the other ranks.
EAGER = (
    '"dtype": torch.float32}',
    '"dtype": torch.float32, "experts_implementation": "eager"}',
)
NO_ROW = [
    ("    rows = F.pad(rows, (0, 0, 0, 1))\n", ""),
    ("    numbers = F.pad(numbers, (0, 1))\n", ""),
    ("rows[:-1], num_received", "rows, num_received"),
]
BACKEND = 'dist.init_process_group("gloo"'
# A collective that waits for longer than this fails. Only broken copies have it.
IMPATIENT = (BACKEND, f"{BACKEND}, timeout=timedelta(seconds=20)")


@pytest.fixture(scope="module")
def one_sided(tmp_path_factory):
    """Flags of a model whose routers choose experts 6 and 7 for each token."""
    folder = tmp_path_factory.mktemp("one-sided")
    config = transformers.AutoConfig.from_pretrained(
        save_config(folder / "c", "gpt_oss", **ARCHITECTURES["gpt_oss"], vocab_size=1025)
    )
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.mlp.router.bias[:6], 0.0)
        torch.nn.init.constant_(layer.mlp.router.bias[6:], 50.0)
    model.save_pretrained(folder / "m")
    save_tokenizer(folder / "m")
    return ("-m", folder / "m")


@pytest.mark.law1
@pytest.mark.parametrize(
    ("processes", "expert_size", "edits"),
    [
        (2, 2, (EAGER,)),
        pytest.param(2, 2, (), marks=pytest.mark.slow),
        pytest.param(4, 2, (EAGER,), marks=pytest.mark.slow),
        pytest.param(4, 4, (), marks=pytest.mark.slow),
        pytest.param(4, 4, (EAGER,), marks=pytest.mark.slow),
    ],
)
def test_all_tokens_choose_experts_of_one_rank(
    curve, one_sided, tmp_path, processes, expert_size, edits
):
    """No expert of the other ranks has a token, in no step. They go on all the same."""
    one = curve("01-single-gpu", 1, *FEW, *one_sided)
    flags = (*FEW, *one_sided, "--expert-size", expert_size)
    split, _ = trained(tmp_path, STAGE, processes, *flags, edits=edits)
    assert_same(one, split)
    for line in split.values():
        assert line["train/max_load_of_expert"] == 8 / 2
        assert line["train/min_load_of_expert"] == 0
        assert line["train/max_load_of_rank"] == expert_size


@pytest.mark.law1
@pytest.mark.slow
def test_without_the_row_of_zeros_ranks_wait_for_each_other(one_sided, tmp_path):
    """Until a collective has waited for longer than its timeout."""
    flags = (*FEW, *one_sided, "--expert-size", 2)
    lines, result = trained(
        tmp_path, STAGE, 2, *flags, edits=[EAGER, IMPATIENT, *NO_ROW], check=False
    )
    assert result.returncode != 0
    assert not lines


# Broken lines. More are rows of the trap `lines`.

ALL_GRADIENTS = "p.grad.to_local() for p in model.parameters()"
COUNTED = "numbers.repeat_interleave(counts_received.flatten()"
MUTANTS = {
    "the norm of experts alone": [
        (ALL_GRADIENTS, ALL_GRADIENTS.replace("model.parameters()", "of_experts"))
    ],
    "counts of another rank": [(COUNTED, "numbers.repeat_interleave(counts.flatten()")],
    "as many rows received as sent": [
        ("torch.stack([counts, counts_received])", "torch.stack([counts, counts])")
    ],
    "numbers sent and received swapped": [
        ("    num_sent, num_received = torch", "    num_received, num_sent = torch")
    ],
    "received rows taken to be sorted by expert": [
        (".repeat(group_size)\n", ".repeat_interleave(group_size)\n")
    ],
    "gradients that do not go back": [
        (
            "ctx.way_back = num_received, num_sent, group",
            "ctx.way_back = num_sent, num_received, group",
        )
    ],
    "rows of other tokens": [
        ("hidden_states[order // num_choices]", "hidden_states[order % len(hidden_states)]")
    ],
}


@pytest.mark.law1
@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_line_is_noticed(curve, masked_data, mixture, tmp_path, name):
    """It moves the loss or the norm of the gradients, or the run does not end well."""
    flags = (*FEW, "--lr", "2e-3", *mixture, "-d", masked_data, "-b", "2")
    flags += ("--max-grad-norm", "0.5", "--warmup-steps", "0")
    one = curve("01-single-gpu", 1, *flags)
    assert min(line["train/grad_norm"] for line in one.values()) > 0.5
    assert_same(one, curve(STAGE, 2, *flags))
    edits = [IMPATIENT, *MUTANTS[name]]
    lines, result = trained(
        tmp_path, STAGE, 2, *flags, "--expert-size", 2, edits=edits, check=False
    )
    if result.returncode == 0:
        with pytest.raises(AssertionError):
            assert_same(one, lines)


# The log

LOADS = ("max_load_of_expert", "min_load_of_expert", "max_load_of_rank")
COUNT = "    if torch.is_grad_enabled():\n        experts.load += counts\n"
WRONG_LOADS = {
    "of the tokens of one rank": [("            dist.all_reduce(load)\n", "")],
    "of all steps since the first": [
        ("                module.load.zero_()\n", "                pass\n")
    ],
    "with the evaluations": [(COUNT, "    experts.load += counts\n")],
    "of the ranks of a shard group": [
        ("load.unflatten(1, (expert_size, -1)).mean(dim=2)", "load[:, ::2]")
    ],
}


def loads_counted(sequences, expert_size):
    """The three loads, from the routers of a model that one process has made."""
    config = load(STAGE).load_config(load(STAGE).TINY)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    counts = []

    def count(router, args, output):
        counts.append(output[2].flatten().bincount(minlength=config.num_local_experts))

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(count)
    with torch.no_grad():
        model(sequences)
    loads = torch.stack(counts) / torch.stack(counts).float().mean(dim=1, keepdim=True)
    of_ranks = torch.stack([part.mean(dim=1) for part in loads.chunk(expert_size, dim=1)])
    return [loads.max().item(), loads.min().item(), of_ranks.max().item()]


def loads_logged(folder, processes, *flags, edits=()):
    """Those of the steps 1, and 2 and 3 together, with an evaluation before. The rate is 0."""
    flags = (*SMALL, "-b", "3", "--lr", "1e-30", "--max-steps", "3", "--eval-freq", "1", *flags)
    path = mutant(folder / "copy", STAGE, *edits) if edits else None
    named = ("-e", "a", "--save-dir", folder, "--log-freq", "3")
    run(STAGE, processes, *flags, *named, path=path)
    lines = metrics(folder / "a")
    return [[lines[step][f"train/{name}"] for name in LOADS] for step in (1, 3)]


def loads_expected(expert_size):
    train, _ = default_sequences(64)
    order = numpy.random.default_rng((0, 0)).permutation(len(train))
    batches = (order[:8], order[8:24])
    return [loads_counted(train[batch], expert_size) for batch in batches]


@pytest.mark.parametrize(
    ("processes", "expert_size", "more"),
    [
        (2, 2, ()),
        pytest.param(4, 2, ("--activation-checkpointing",), marks=pytest.mark.slow),
        pytest.param(4, 4, (), marks=pytest.mark.slow),
    ],
)
def test_the_log_has_the_loads_of_experts_and_ranks(tmp_path, processes, expert_size, more):
    """The share of the tokens of all ranks in the steps since the last line that an expert or a
    rank has had, in the block where it is largest or smallest. 1 is as much as all others."""
    found = loads_logged(tmp_path, processes, "--expert-size", expert_size, *more)
    for logged, expected in zip(found, loads_expected(expert_size), strict=True):
        assert logged == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG_LOADS)
def test_wrong_loads_are_noticed(tmp_path, name):
    found = loads_logged(tmp_path, 2, "--expert-size", 2, edits=WRONG_LOADS[name])
    assert found != [pytest.approx(loads, rel=1e-6) for loads in loads_expected(2)]


# What a rank sends

WATCH = """
def watched(original):
    def exchange(output, rows, *args, **kwargs):
        sent.append([rows.numel(), output.numel(), rows.shape[1] == 128])
        return original(output, rows, *args, **kwargs)
    return exchange

sent = []
dist.all_to_all_single = watched(dist.all_to_all_single)


"""
BEGIN = "@record  # torchrun"
UPDATE = "        # Update. The gradients are clipped"
SAY = f'        say("SENT" + json.dumps(sent))\n        sys.exit()\n{UPDATE}'


@pytest.mark.parametrize(
    ("processes", "more", "times"),
    [
        (2, (), 4),
        pytest.param(4, ("--activation-checkpointing",), 6, marks=pytest.mark.slow),
    ],
)
def test_each_pair_of_a_token_and_an_expert_travels_there_and_back(
    tmp_path, mixture, processes, more, times
):
    """In each of L blocks: K rows for a token, once there and once back, and so do their gradients.
    A block that repeats its forward pass repeats both exchanges. Two numbers for each expert of a
    block say how many rows there are."""
    path = mutant(tmp_path, STAGE, (BEGIN, WATCH + BEGIN), (UPDATE, SAY))
    flags = ("-s", 64, "--global-batch-size", 4 * processes, "-b", 4, "--max-steps", 1)
    flags += ("--eval-sequences", 1, "--expert-size", processes, *mixture, *more)
    out = run(STAGE, processes, *flags, path=path).out
    sent = json.loads(out.split("SENT")[1].splitlines()[0])
    rows = [entry for entry in sent if entry[2]]
    layers, hidden_size, tokens, choices = 3, 128, 4 * 64, 2
    assert len(rows) == times * layers
    own = tokens * choices * hidden_size  # what this rank sends there, and gets back
    assert sum(entry[0] == own for entry in rows) >= times // 2 * layers
    assert sum(entry[1] == own for entry in rows) >= times // 2 * layers
    assert len(sent) - len(rows) == (times - 2) // 2 * layers


# Checkpoints

STEADY = (*SMALL, "--log-freq", "1", "--dtype", "fp32", "--lr-scheduler", "constant")
STEADY += ("--warmup-steps", "5")
WALK = [
    ("03-fsdp", 2, ()),
    (STAGE, 2, ("--expert-size", 2)),
    ("03-fsdp", 4, ()),
    (STAGE, 4, ("--expert-size", 4)),
    (STAGE, 4, ("--expert-size", 2)),
    ("01-single-gpu", 1, ()),
    (STAGE, 2, ("--expert-size", 1)),
    ("02-ddp", 2, ()),
    (STAGE, 3, ("--expert-size", 3)),
    ("05-multinode", 2, ()),
]
# With six experts these are cut in the other dimension where their number does not divide.
ODD = [WALK[4], WALK[0], (STAGE, 4, ("--expert-size", 1)), WALK[8], WALK[5]]


@pytest.mark.law3
@pytest.mark.slow
@pytest.mark.parametrize(("walk", "num_experts"), [(WALK, 12), (ODD, 6)])
def test_a_run_changes_its_stage_and_its_expert_size(curve, tmp_path, walk, num_experts):
    """Two steps on each. The curve is that of stage 01. Each token has all experts."""
    sizes = {"num_local_experts": num_experts, "num_experts_per_tok": num_experts}
    model = ("-m", save_mixture(tmp_path / "m", **sizes), "--from-scratch")
    named = ("-e", "a", "--save-dir", tmp_path)
    for number, (stage, processes, more) in enumerate(walk):
        flags = (*exact(stage, processes), *STEADY, *model, *named, *more)
        out = run(stage, processes, *flags, "--max-steps", 2 + 2 * number).out
        assert (f"resumed from {tmp_path}/a/step-{2 * number:08d}" in out) == (number > 0)
    resumed = metrics(tmp_path / "a")
    assert list(resumed) == list(range(1, 2 * len(walk) + 1))
    whole = curve("01-single-gpu", 1, *STEADY, *model, "--max-steps", 2 * len(walk))
    assert_same_curve(whole, resumed, resumed)


@pytest.mark.law3
@pytest.mark.slow
def test_the_export_is_the_trained_model(tmp_path, mixture):
    """The same tensors under the same names as on one process, and `from_pretrained` opens it."""
    # AdamW divides by the size of a gradient, so it turns rounding into differences of the learning
    # rate where a gradient is nearly 0.
    flags = (*FEW, "--lr", "2e-4", "--save-dir", tmp_path, *mixture)
    run("01-single-gpu", 1, *flags, "-e", "one")
    run(STAGE, 4, *flags, "-e", "split", "--expert-size", 2)
    files = [tmp_path / name / "final_model" / "model.safetensors" for name in ("one", "split")]
    one, split = map(load_file, files)
    assert one.keys() == split.keys()
    assert any("expert" in name for name in one)
    for name in one:
        assert torch.allclose(one[name], split[name], atol=1e-5), name
    tokens = torch.arange(32)[None] * 7 % 1024
    models = [AutoModelForCausalLM.from_pretrained(file.parent) for file in files]
    logits = [model(tokens).logits for model in models]
    assert torch.allclose(*logits, atol=1e-4)


@pytest.mark.law1
@pytest.mark.slow
def test_pretrained_weights_are_trained_as_on_one_process(curve, tmp_path):
    """bf16 weights, as a hub has them."""
    config = transformers.AutoConfig.from_pretrained(
        save_config(tmp_path / "c", "qwen3_moe", vocab_size=1025, **MOE)
    )
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "m")
    save_tokenizer(tmp_path / "m")
    one = curve("01-single-gpu", 1, *FEW, "-m", tmp_path / "m")
    assert_same(one, curve(STAGE, 4, *FEW, "-m", tmp_path / "m"))


# The sample


@pytest.mark.slow
def test_the_sample_is_that_of_stage_03(mixture):
    def sample(stage, *more):
        out = run(stage, 4, *FEW, *mixture, *more, sampled=True).out
        return out.split("prompt, from text that the model was not trained on:")[1]

    assert sample(STAGE, "--expert-size", 2) == sample("03-fsdp")


# fp16


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("place", ["of_experts[0]", "others[0]"])
def test_an_overflow_of_fp16_on_one_rank_skips_the_step_on_all(tmp_path, processes, place):
    """Also on the ranks that have no part of the expert with it."""
    overflow = OVERFLOW.replace("next(model.parameters())", place)
    assert overflow != OVERFLOW
    edits = [
        ("        scaler.unscale_(optimizer)\n", overflow),
        ("        scaler.update()\n", OVERFLOWED),
        ("GradScaler(device.type, ", "GradScaler(device.type, init_scale=256.0, "),
    ]
    path = mutant(tmp_path, STAGE, *edits)
    flags = (*SMALL, "--max-steps", "3", "--dtype", "fp16", "--expert-size", 2)
    out = run(STAGE, processes, *flags, path=path).out
    lines = [line.split("CHANGED ")[1] for line in out.splitlines() if "CHANGED" in line]
    every = [[True] * processes, [False] * processes, [True] * processes]
    assert lines == [f"{i + 1} {every[i]} {scale}" for i, scale in enumerate((256.0, 128.0, 128.0))]


# Bad input


@pytest.mark.parametrize(
    ("processes", "flags", "message"),
    [
        (3, (), "--expert-size 2: does not divide 3 processes"),
        pytest.param(
            3,
            ("--expert-size", 3),
            "--expert-size 3: does not divide 8 experts",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_flags_that_do_not_fit_end_in_one_line(processes, flags, message):
    result = run(STAGE, processes, *FEW, *flags, check=False)
    assert result.returncode != 0
    assert result.errors == [f"train-llm.py: error: {message}"]


# Llama has no experts. Those of the others have another interface: Llama 4 gives all tokens to each
# of them, JetMoe has some in its attention, and some of LongCat's compute nothing.
REFUSED = {
    "llama": {},
    "llama4_text": {"num_local_experts": 8, "intermediate_size_mlp": 64, "head_dim": 8},
    "jetmoe": {"num_local_experts": 8, "num_experts_per_tok": 2, "kv_channels": 8},
    "longcat_flash": {"n_routed_experts": 8, "num_layers": 1, "zero_expert_num": 2},
}


@pytest.mark.parametrize(
    "architecture",
    [x if x == "llama" else pytest.param(x, marks=pytest.mark.slow) for x in REFUSED],
)
def test_a_model_without_experts_to_split_ends_in_one_line(tmp_path, architecture):
    folder = save_config(tmp_path / "m", architecture, **REFUSED[architecture])
    result = run(STAGE, 2, *FEW, "-m", folder, "--from-scratch", check=False)
    assert result.returncode != 0
    said = f"--model-name: {architecture} has no experts to split, use 03-fsdp"
    assert result.errors == [f"train-llm.py: error: {said}"]

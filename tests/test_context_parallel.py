"""Stage 09: ranks that share the tokens of a sequence compute what one process does."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import (
    MASK,
    SMALL,
    UNWATCHED,
    assert_same_curve,
    exact,
    load,
    metrics,
    mutant,
    run,
    save_rows,
    save_tokenizer,
)
from test_tensor_parallel import (
    OVERFLOW,
    OVERFLOWED,
    SIZES,
    gradients,
    planned_bytes,
    save_config,
    sent_in_a_group,
    watched_stage,
)
from transformers import AutoModelForCausalLM

import plan

STAGE = "09-context-parallel"
FIFTY = ("--max-steps", "50", "--dtype", "fp32", *SMALL)
SIX = ("--max-steps", "6", "--dtype", "fp32", "--lr", "2e-3", *SMALL)
FEW = (*SMALL, "--max-steps", "3", "--dtype", "fp32")


# Which tokens a rank has


def rank_of(rank, size):
    """What the functions below need of a context mesh."""
    return SimpleNamespace(
        get_local_rank=lambda: rank, size=lambda mesh_dim=None: size, device_type="cpu"
    )


@pytest.mark.parametrize("size", range(1, 7))
def test_each_token_is_on_one_rank_and_all_ranks_have_the_same_work(size):
    """The work of attention: the pairs of a token and one that it sees."""
    stage = load(STAGE)
    ranks = [rank_of(rank, size) for rank in range(size)]
    chunks = [chunk for rank in ranks for chunk in stage.own_chunks(rank)]
    assert sorted(chunks) == list(range(2 * size))

    length = 10 * size
    positions = [stage.own_positions(length, rank).tolist() for rank in ranks]
    assert sorted(sum(positions, [])) == list(range(length))
    pairs = [sum(position + 1 for position in own) for own in positions]
    assert pairs == [length * (length + 1) / 2 / size] * size


# Equal curves


@pytest.mark.law1
@pytest.mark.slow
def test_fifty_steps_are_those_of_one_process(curve):
    """A state of 1/W, as in stage 03."""
    one, processes = curve("01-single-gpu", 1, *FIFTY), 4
    split = curve(STAGE, processes, *FIFTY, "--context-size", 2)
    assert_same_curve(one, split, range(1, 51))
    whole = one[50]["memory/state_gb"]
    assert split[50]["memory/state_gb"] == pytest.approx(whole / processes, rel=0.01)


# The processes, the flags, and those that only this stage has.
CASES = {
    "masked labels": (2, ("-b", "2"), ()),
    "masked labels in two groups": (4, ("-b", "2"), ()),
    "a batch that the groups do not divide": (4, ("--global-batch-size", "7", "-b", "3"), ()),
    "a group that has no sequence": (4, ("--global-batch-size", "1"), ()),
    "activation checkpointing": (2, ("--activation-checkpointing",), ()),
    "gathered once": (4, ("-b", "1"), ("--no-reshard-after-forward",)),
    "groups of one rank": (2, (), ("--context-size", 1)),
    "an evaluation between the steps": (4, ("--eval-freq", "2"), ("--context-size", 4)),
}


@pytest.mark.law1
@pytest.mark.parametrize(
    "case", [c if c == "masked labels" else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_the_same_curve_in_each_case(curve, masked_data, case):
    """In groups of two ranks, if the case does not say otherwise."""
    processes, more, own = CASES[case]
    flags = (*SIX, *more)
    if case.startswith("masked labels"):
        flags += ("-d", masked_data)
    one = curve("01-single-gpu", 1, *flags)
    split = curve(STAGE, processes, *flags, "--context-size", 2, *own)
    assert_same_curve(one, split, one)


@pytest.mark.law1
@pytest.mark.slow
def test_compiled_as_eager(curve, masked_data):
    flags = (*SIX, "--activation-checkpointing", "-b", "2", "--eval-freq", "2", "-d", masked_data)
    one = curve("01-single-gpu", 1, *flags)
    flags += ("--no-reshard-after-forward",)
    eager = curve(STAGE, 2, *flags)
    compiled = curve(STAGE, 2, *flags, "--compile")
    assert_same_curve(one, eager, one)
    assert_same_curve(eager, compiled, eager)


@pytest.mark.law1
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_smaller_type_has_almost_the_curve_of_fp32(curve, dtype):
    one = curve("01-single-gpu", 1, *SIX)
    small = curve(STAGE, 2, *SIX, "--dtype", dtype)
    assert_same_curve(one, small, one, rel_loss=5e-4, rel_norm=0.1)


@pytest.mark.law1
@pytest.mark.slow
def test_pretrained_weights_are_trained_as_on_one_process(curve, tmp_path):
    """bf16 weights of a tied Qwen 3, as a hub has them."""
    config = transformers.AutoConfig.from_pretrained(
        save_config(tmp_path / "c", "qwen3", vocab_size=1025, tie_word_embeddings=True)
    )
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "m")
    save_tokenizer(tmp_path / "m")
    one = curve("01-single-gpu", 1, *FEW, "-m", tmp_path / "m")
    split = curve(STAGE, 4, *FEW, "-m", tmp_path / "m")
    assert_same_curve(one, split, range(1, 4))


# Gradients of each parameter

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
ARCHITECTURES = [
    ("llama", {"num_key_value_heads": 1}, 4),
    ("llama", {"rope_parameters": LLAMA3_ROPE}, 4),
    ("qwen3", {"tie_word_embeddings": True}, 2),
    ("gpt2", {}, 4),
    ("gemma", {}, 2),
    ("mixtral", {"num_local_experts": 4}, 4),
    ("gpt_neox", {}, 2),
]


@pytest.mark.law1
@pytest.mark.parametrize(
    ("architecture", "sizes", "context_size"),
    [
        ("llama", {}, 2),
        *[pytest.param(*values, marks=pytest.mark.slow) for values in ARCHITECTURES],
    ],
)
def test_every_gradient_is_that_of_one_process(tmp_path, architecture, sizes, context_size):
    """Also of models that add a vector for each position, or have one head of keys and values."""
    model = save_config(tmp_path / "m", architecture, **sizes)
    flags = ("-s", "32", "--global-batch-size", "4", "-b", "2", "--max-steps", "1")
    flags += ("-m", model, "--from-scratch", "--eval-sequences", 2)
    one = gradients(tmp_path, "01-single-gpu", 1, *flags)
    split = gradients(tmp_path, STAGE, context_size, *flags, "--context-size", context_size)
    assert split.keys() == one.keys()
    largest = max(gradient.norm() for gradient in one.values())
    for name, gradient in one.items():
        error = (split[name] - gradient).norm()
        assert error <= 2e-5 * gradient.norm() + 1e-7 * largest, name


# Broken lines. Most of those of this stage are rows of the trap `lines`.

MUTANTS = {
    "each token sees its successor": [
        (MASK, "        mask = torch.ones(length, end).tril(end - length + 1).bool()\n")
    ],
    "no token sees itself": [
        (MASK, "        mask = torch.ones(length, end).tril(end - length - 1).bool()\n")
    ],
}


@pytest.mark.law1
@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_line_is_noticed(curve, tmp_path, name):
    one = curve("01-single-gpu", 1, *SIX)
    path = mutant(tmp_path / "mutant", STAGE, *MUTANTS[name])
    named = ("-e", "a", "--save-dir", tmp_path, "--log-freq", 1, "--context-size", 2)
    run(STAGE, 2, *SIX, *named, path=path)
    with pytest.raises(AssertionError):
        assert_same_curve(one, metrics(tmp_path / "a"), one)


# What a rank holds and sends


def watched(folder, context_size, *flags):
    """What one step of a context group holds and sends, as rank 0 sees it."""
    flags = ("--context-size", context_size, *flags)
    edits = [UNWATCHED]
    return watched_stage(folder, STAGE, context_size, *flags, edits=edits)


def micro_batch(folder, layers):
    """Flags of a step with one micro-batch of 4 sequences of 64 tokens."""
    model = save_config(folder / f"m{layers}", "llama", num_hidden_layers=layers)
    flags = ("-m", model, "--from-scratch", "--dtype", "fp32")
    return (*flags, "-s", 64, "--global-batch-size", 4, "-b", 4)


@pytest.mark.parametrize("more", [(), ("--activation-checkpointing",)])
@pytest.mark.parametrize(
    ("context_size", "layers"),
    [(2, 2), pytest.param(4, 3, marks=pytest.mark.slow)],
)
def test_each_block_gathers_its_keys_and_values(tmp_path, context_size, layers, more):
    """Two all-gathers in the forward pass, and in the backward pass two reduce-scatters of their
    gradients. A block that repeats its forward pass also repeats the all-gathers."""
    flags = micro_batch(tmp_path, layers)
    facts = watched(tmp_path, context_size, *flags, *more)
    head_size = SIZES["hidden_size"] // SIZES["num_attention_heads"]
    keys = 4 * 64 * SIZES["num_key_value_heads"] * head_size
    gathers = (4 if more else 2) * layers
    expected = {"all_gather_into_tensor": gathers, "reduce_scatter_tensor": 2 * layers}
    calls = {name: n for name, n in facts["calls"].items() if not name.startswith("_")}
    assert calls == expected
    assert [facts["elements"][name] for name in expected] == [n * keys for n in expected.values()]
    split = plan.Split(STAGE, context_size=context_size)
    planned = planned_bytes(flags[1], split, recompute=bool(more))
    assert planned["group"] == sent_in_a_group(facts, context_size)


def kept_by_a_block(folder, stage, context_size, *more):
    """Bytes that one more block keeps for the backward pass."""
    saved = []
    for layers in (2, 3):
        flags = (*micro_batch(folder, layers), *more)
        here = folder / f"{stage}-{context_size}-{layers}"
        if stage == STAGE:
            saved.append(watched(here, context_size, *flags)["saved"])
        else:
            saved.append(watched_stage(here, stage, 1, *flags)["saved"])
    return saved[1] - saved[0]


@pytest.mark.slow
@pytest.mark.parametrize("context_size", [2, 4])
def test_a_rank_keeps_its_tokens_and_all_keys_and_values(tmp_path, context_size):
    """Of a block that keeps M bytes on one process: M / C, the keys and values of the other ranks,
    and the outputs of attention for its two chunks, which are kept again as one tensor."""
    whole = kept_by_a_block(tmp_path, "03-fsdp", 1)
    tokens, features = 4 * 64, SIZES["hidden_size"]
    keys = tokens * SIZES["num_key_value_heads"] * features // SIZES["num_attention_heads"]
    gathered = 2 * keys - 2 * keys // context_size
    outputs = tokens * features // context_size
    # A CPU also keeps a mask for the second chunk of rank 0, which sees all tokens. The first one
    # sees only itself, and needs none. A flash kernel on a GPU needs neither.
    mask = 64 // (2 * context_size) * 64
    kept = kept_by_a_block(tmp_path, STAGE, context_size)
    assert kept == whole / context_size + 4 * (gathered + outputs + mask)


@pytest.mark.slow
def test_with_activation_checkpointing_a_rank_keeps_its_part_of_the_input(tmp_path):
    """Of the input of each block, 1 / C, and nothing else."""
    for context_size in (2, 4):
        kept = kept_by_a_block(tmp_path, STAGE, context_size, "--activation-checkpointing")
        assert kept == 4 * 4 * 64 * SIZES["hidden_size"] / context_size


# Checkpoints

STEADY = (*SMALL, "--log-freq", "1", "--dtype", "fp32", "--lr-scheduler", "constant")
STEADY += ("--warmup-steps", "5")
WALK = [
    ("03-fsdp", 2, ()),
    (STAGE, 2, ("--context-size", 2)),
    ("01-single-gpu", 1, ()),
    (STAGE, 4, ("--context-size", 4)),
    (STAGE, 4, ("--context-size", 2)),
    ("02-ddp", 2, ()),
    (STAGE, 2, ("--context-size", 1)),
    ("08-pipeline-parallel", 2, ("-b", "1")),
    ("01-single-gpu", 1, ()),
]


@pytest.mark.law3
@pytest.mark.slow
def test_a_run_changes_its_context_size(curve, tmp_path):
    """Three steps on each. The curve is that of stage 01, and so is the model at the end."""
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


@pytest.mark.law3
@pytest.mark.slow
def test_the_export_is_the_trained_model(tmp_path):
    """`from_pretrained` opens it, and its logits are those of the same run on one process."""
    tokens = torch.arange(32)[None] * 7 % 1024
    logits = {}
    # AdamW divides by the size of a gradient, so it turns rounding into differences of the learning
    # rate where a gradient is nearly 0.
    flags = (*FEW, "--lr", "2e-4", "--save-dir", tmp_path)
    for stage, processes in (("01-single-gpu", 1), (STAGE, 2)):
        run(stage, processes, *flags, "-e", stage, *exact(stage, processes))
        model = AutoModelForCausalLM.from_pretrained(tmp_path / stage / "final_model")
        assert model.config._attn_implementation == "sdpa"
        logits[stage] = model(tokens).logits
    assert torch.allclose(logits["01-single-gpu"], logits[STAGE], atol=1e-5)


# The sample


def sample_of(stage, processes, *flags):
    out = run(stage, processes, *flags, sampled=True).out
    return out.split("prompt, from text that the model was not trained on:")[1]


@pytest.mark.slow
@pytest.mark.parametrize(("context_size", "prompt"), [(2, None), (4, 34)])
def test_the_sample_is_that_of_stage_03(tmp_path, context_size, prompt):
    """Where the ranks could not share its tokens equally, it has a few more tokens."""
    flags = (*FEW, "-s", 128)
    if prompt:
        rows = []
        for number in range(40):
            ids = [(7 * number + 3 * i) % 250 + 1 for i in range(128)]
            rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
        flags += ("-d", save_rows(tmp_path / "rows", rows))
    expected = sample_of("03-fsdp", 2, *flags).rstrip("\n\ufffd")  # of a part of a character
    found = sample_of(STAGE, context_size, *flags, "--context-size", context_size)
    assert found.startswith(expected)
    assert prompt or found.rstrip("\n\ufffd") == expected


# fp16


@pytest.mark.slow
def test_an_overflow_of_fp16_on_one_rank_skips_the_step_on_all(tmp_path):
    processes = 2
    edits = [
        ("        scaler.unscale_(optimizer)\n", OVERFLOW),
        ("        scaler.update()\n", OVERFLOWED),
        ("GradScaler(device.type, ", "GradScaler(device.type, init_scale=256.0, "),
    ]
    path = mutant(tmp_path, STAGE, *edits)
    flags = (*SMALL, "--max-steps", "3", "--dtype", "fp16", "--context-size", 2)
    out = run(STAGE, processes, *flags, path=path).out
    lines = [line.split("CHANGED ")[1] for line in out.splitlines() if "CHANGED" in line]
    every = [[True] * processes, [False] * processes, [True] * processes]
    assert lines == [f"{i + 1} {every[i]} {scale}" for i, scale in enumerate((256.0, 128.0, 128.0))]


# Bad input


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--context-size", 3), "--context-size 3: does not divide 2 processes"),
        pytest.param(
            ("-s", 62),
            "--seq-length 62: must be a multiple of twice --context-size",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--attn", "eager"),
            "--model-name, --attn: attention of kind eager cannot be split, use 03-fsdp",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_flags_that_do_not_fit_end_in_one_line(flags, message):
    result = run(STAGE, 2, *FEW, *flags, check=False)
    assert result.returncode != 0
    assert result.errors == [f"train-llm.py: error: {message}"]


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 128,
}
WINDOW = "see all tokens before them, use 03-fsdp"
KIND = "attention of kind {} cannot be split, use 03-fsdp"
QWEN2_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
REFUSED = [
    ("gemma3_text", {}, KIND.format("sliding_attention")),
    ("mistral", {"sliding_window": 8}, WINDOW),
    ("qwen2", QWEN2_WINDOW, KIND.format("sliding_attention")),
    (
        "phi3",
        {"rope_parameters": LONGROPE},
        "attention of kind longrope cannot be split, use 03-fsdp",
    ),
    ("falcon", {}, "the attention of falcon cannot be replaced, use 03-fsdp"),
    ("bloom", {}, KIND.format("eager")),
    ("doge", {}, "its attention makes a mask of its own, use 03-fsdp"),
    ("mamba", {}, KIND.format("eager, linear_attention")),
]


@pytest.mark.parametrize(
    ("architecture", "sizes", "message"),
    [
        values if values[0] == "mistral" else pytest.param(*values, marks=pytest.mark.slow)
        for values in REFUSED
    ],
)
def test_a_model_that_cannot_be_split_ends_in_one_line(tmp_path, architecture, sizes, message):
    folder = save_config(tmp_path / "m", architecture, **sizes)
    result = run(STAGE, 2, *FEW, "-m", folder, "--from-scratch", check=False)
    assert result.returncode != 0
    assert "step     1/" not in result.out
    [line] = result.errors
    assert message in line

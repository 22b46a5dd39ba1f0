"""Stage 08: a pipeline computes what one process does. A pipeline stage holds only its layers."""

import copy
import json
import re
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import (
    FAULTS,
    SMALL,
    SUPPORT,
    TEST_MODULES,
    assert_same_curve,
    exact,
    finish,
    fork,
    load,
    metrics,
    mutant,
    run,
    same_bits,
    save_tokenizer,
)
from transformers import AutoModelForCausalLM

STAGE = "08-pipeline-parallel"
# 8 sequences a step in micro-batches of one: as many as four pipeline stages need, also in two
# pipelines.
SMALL = (*SMALL, "-b", "1")
FIFTY = ("--max-steps", "50", "--dtype", "fp32", *SMALL)
FEW = (*SMALL, "--max-steps", "3", "--dtype", "fp32")
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
# Those that the stage serves.
ARCHITECTURES = ["llama", "mistral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "smollm3"]


def config_of(architecture, **sizes):
    config = transformers.AutoConfig.for_model(architecture, **SIZES | sizes)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = 0
    if hasattr(config, "rotary_dim"):
        config.rotary_dim = 4
    return config


def save_config(folder, architecture, **sizes):
    config_of(architecture, **sizes).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


# Equal curves


@pytest.mark.law1
@pytest.mark.slow
def test_fifty_steps(curve, tmp_path):
    """In two pipelines of two stages, with another weight at each end."""
    folder = save_config(tmp_path / "m", "llama", tie_word_embeddings=False)
    model = ("-m", folder, "--from-scratch")
    one = curve("01-single-gpu", 1, *FIFTY, *model)
    split = curve(STAGE, 4, *FIFTY, *model, "--stages", 2)
    assert_same_curve(one, split, range(1, 51))
    assert split[50]["eval/loss"] == pytest.approx(one[50]["eval/loss"], rel=1e-5)


# The flags, and those that only this stage has.
CASES = {
    "masked labels": (("--max-steps", "8", "-b", "2"), ()),
    "a batch that the pipelines do not divide": (("--global-batch-size", "7"), ()),
    "a shorter last micro-batch": (
        ("--global-batch-size", "10", "-b", "2"),
        ("--schedule", "gpipe"),
    ),
    "gathered once": (("--activation-checkpointing",), ("--no-reshard-after-forward",)),
    "three blocks on two pipeline stages": (("-m", "tiny"), ()),
    "four pipeline stages": ((), ("--stages", "4")),
}


@pytest.mark.law1
@pytest.mark.parametrize(
    "case", [c if c == "masked labels" else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_the_same_curve_in_each_case(curve, masked_data, tmp_path, case):
    """On two pipelines of two stages, if the case does not say otherwise."""
    model = ("-m", save_config(tmp_path / "m", "llama", tie_word_embeddings=True), "--from-scratch")
    more, own = CASES[case]
    flags = ("--max-steps", "6", *SMALL, "--dtype", "fp32", "--lr", "2e-3", *model, *more)
    if case == "masked labels":
        flags += ("-d", masked_data)
    one = curve("01-single-gpu", 1, *flags)
    split = curve(STAGE, 4, *flags, "--stages", 2, *own)
    assert_same_curve(one, split, one)


@pytest.mark.law1
@pytest.mark.slow
def test_compiled_as_eager(curve):
    """With an evaluation between the steps, and activation checkpointing."""
    flags = (*SMALL, "--max-steps", "4", "--eval-freq", "2", "--dtype", "fp32", "--stages", 2)
    eager = curve(STAGE, 2, *flags)
    compiled = curve(STAGE, 2, *flags, "--compile", "--activation-checkpointing")
    assert_same_curve(eager, compiled, range(1, 5))
    assert compiled[4]["eval/loss"] == pytest.approx(eager[4]["eval/loss"], rel=1e-5)


# More are in the traps `pipeline-parallel` and `lines`.
MUTANTS = {
    "loss not reduced": [
        ("            dist.all_reduce(step_loss, group=stage.", "            id(stage.")
    ],
}


@pytest.mark.law1
@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_line_is_noticed(curve, tmp_path, name):
    folder = save_config(tmp_path / "m", "llama", tie_word_embeddings=True)
    flags = ("--max-steps", "6", *SMALL, "--dtype", "fp32", "--lr", "2e-3")
    flags += ("-m", folder, "--from-scratch")
    one = curve("01-single-gpu", 1, *flags)
    path = mutant(tmp_path / "mutant", STAGE, *MUTANTS[name])
    named = ("-e", "a", "--save-dir", tmp_path, "--log-freq", 1, "--stages", 2)
    run(STAGE, 4, *flags, *named, path=path)
    with pytest.raises(AssertionError):
        assert_same_curve(one, metrics(tmp_path / "a"), one)


# Architectures


@pytest.fixture(scope="session")
def stage():
    return load(STAGE)


def pipeline_stage_of(stage, model, index, num_stages):
    """A copy of a model with the blocks of one pipeline stage, and the pipeline stage."""
    model = copy.deepcopy(model)
    pipeline_stage = SimpleNamespace(index=index, last=num_stages - 1)
    pipeline_stage.is_first, pipeline_stage.is_last = index == 0, index == num_stages - 1
    stage.keep_stage(model, list(model.model.layers), pipeline_stage)
    return model, pipeline_stage


@pytest.mark.law1
@pytest.mark.parametrize(
    "architecture",
    [x if x == "llama" else pytest.param(x, marks=pytest.mark.slow) for x in ARCHITECTURES],
)
@pytest.mark.parametrize(("num_stages", "tied"), [(2, True), (4, False)])
def test_every_gradient_is_that_of_the_whole_model(stage, architecture, num_stages, tied):
    """One pipeline stage after the other, in one process. The logits have the same bits."""
    assert set(stage.LLAMA_LIKE) == set(ARCHITECTURES)
    config = config_of(architecture, tie_word_embeddings=tied)
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tokens = torch.arange(64).view(2, 32) * 7 % 1024
    logits = whole(input_ids=tokens, use_cache=False).logits
    logits.square().mean().backward()

    inputs, outputs, pipeline_stages = [tokens], [], []
    for index in range(num_stages):
        part, pipeline_stage = pipeline_stage_of(stage, whole, index, num_stages)
        pipeline_stages.append(part)
        name = "input_ids" if index == 0 else "inputs_embeds"
        outputs.append(part(**{name: inputs[index]}, use_cache=False).logits)
        inputs.append(outputs[index].detach().requires_grad_())
    assert torch.equal(outputs[-1], logits)
    inputs[-1].square().mean().backward()
    for index in reversed(range(num_stages)):
        outputs[index].backward(inputs[index + 1].grad)

    largest = max(p.grad.norm() for p in whole.parameters() if p.grad is not None)
    found = set()
    for name, parameter in whole.named_parameters():
        copies = [dict(part.named_parameters()).get(name) for part in pipeline_stages]
        copies = [copy for copy in copies if copy is not None]
        is_shared = whole.get_input_embeddings().weight is whole.get_output_embeddings().weight
        is_shared = is_shared and parameter is whole.get_input_embeddings().weight
        assert len(copies) == (2 if is_shared else 1), name
        found.add(name)
        if parameter.grad is not None:
            error = (sum(copy.grad for copy in copies) - parameter.grad).norm()
            assert error <= 1e-5 * parameter.grad.norm() + 1e-7 * largest, name
    names = {name for part in pipeline_stages for name, _ in part.named_parameters()}
    assert names == found  # the names of checkpoints


@pytest.mark.parametrize(
    ("sizes", "num_stages", "expected"),
    [
        ({"num_hidden_layers": 3}, 2, [2, 1]),
        ({"num_hidden_layers": 6}, 4, [2, 2, 1, 1]),
        # An output layer that is as much work as several blocks.
        ({"num_hidden_layers": 8, "vocab_size": 4096}, 2, [7, 1]),
        ({"num_hidden_layers": 8, "vocab_size": 4096}, 4, [3, 2, 2, 1]),
        ({"num_hidden_layers": 4, "vocab_size": 4096}, 4, [1, 1, 1, 1]),
        ({"num_hidden_layers": 4}, 1, [4]),
    ],
)
def test_the_blocks_are_split_by_their_work(stage, sizes, num_stages, expected):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of("llama", **sizes))
    found = []
    for index in range(num_stages):
        part, _ = pipeline_stage_of(stage, model, index, num_stages)
        found.append(sum(not isinstance(m, stage.PassThrough) for m in part.model.layers))
    assert found == expected


@pytest.mark.parametrize(
    ("layers", "sizes", "num_stages", "most"),
    [
        # Qwen3-8B, Llama-3.2-1B and 3.1-8B.
        (36, (4096, 12288, 151936, 32, 8, 128), 4, 1.05),
        (36, (4096, 12288, 151936, 32, 8, 128), 8, 1.05),
        (16, (2048, 8192, 128256, 32, 8, 64), 2, 1.06),
        (32, (4096, 14336, 128256, 32, 8, 128), 4, 1.05),
    ],
)
def test_no_pipeline_stage_has_much_more_work(stage, layers, sizes, num_stages, most):
    """By the parameters of matrices; embeddings are looked up, which is no work."""
    names = ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads")
    sizes = dict(zip((*names, "num_key_value_heads", "head_dim"), sizes, strict=True))
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    work = []
    for index in range(num_stages):
        part, _ = pipeline_stage_of(stage, model, index, num_stages)
        matrices = [m.weight for m in part.modules() if isinstance(m, torch.nn.Linear)]
        work.append(sum(matrix.numel() for matrix in matrices))
    assert max(work) / (sum(work) / num_stages) < most


@pytest.mark.slow
@pytest.mark.parametrize(("num_stages", "tied"), [(2, True), (4, False)])
def test_the_state_is_that_of_the_largest_pipeline_stage(stage, curve, tmp_path, num_stages, tied):
    """16 bytes for each of its parameters, divided by the number of pipelines."""
    sizes = {"vocab_size": 1024, "tie_word_embeddings": tied}
    model = ("-m", save_config(tmp_path / "m", "llama", **sizes), "--from-scratch")
    flags = (*model, *FEW, "--stages", num_stages)
    measured = curve(STAGE, 4, *flags)[3]["memory/state_gb"] * 1e9
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config_of("llama", **sizes))
        pipeline_stages = [
            pipeline_stage_of(stage, whole, index, num_stages)[0] for index in range(num_stages)
        ]
    largest = max(sum(p.numel() for p in part.parameters()) for part in pipeline_stages)
    assert measured == pytest.approx(16 * largest * num_stages / 4, rel=0.02)


# What a pipeline stage keeps, and when it computes


def written_by(what, folder, num_stages, micro_batches, schedule):
    """Runs one pipeline by tests/support/pipeline_worker.py: what each rank has written."""
    model = save_config(folder / "m", "llama")
    flags = ("-m", model, "--from-scratch", "-s", 32, "-b", 1, "--global-batch-size", micro_batches)
    flags += ("--max-steps", 2, "--eval-sequences", 2, "--schedule", schedule)
    words = (what, folder, *flags, "--stages", num_stages)
    worker = SUPPORT / "pipeline_worker.py"
    result = finish(fork(worker, num_stages, *words, PYTHONPATH=TEST_MODULES))
    assert result.returncode == 0, result.err
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_stages)]


@pytest.mark.parametrize(
    ("num_stages", "micro_batches", "schedule"),
    [
        (4, 6, "1f1b"),
        pytest.param(4, 6, "gpipe", marks=pytest.mark.slow),
    ],
)
def test_activations_that_a_pipeline_stage_keeps(tmp_path, num_stages, micro_batches, schedule):
    """With 1F1B those of S − s micro-batches on pipeline stage s, with GPipe those of all."""
    written = written_by("kept", tmp_path, num_stages, micro_batches, schedule)
    for pipeline_stage, (first, most) in enumerate(written):
        number = num_stages - pipeline_stage if schedule == "1f1b" else micro_batches
        assert most / first == pytest.approx(number, rel=0.02)


@pytest.mark.parametrize(
    ("num_stages", "micro_batches", "schedule"),
    [
        (4, 6, "1f1b"),
        pytest.param(4, 6, "gpipe", marks=pytest.mark.slow),
        pytest.param(4, 4, "1f1b", marks=pytest.mark.slow),
    ],
)
def test_the_bubble_is_that_of_the_formula(tmp_path, num_stages, micro_batches, schedule):
    """By a virtual clock, which pipeline stages exchange with their tensors: exactly."""
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
    begin = "@record  # torchrun"
    place = "        # The gradient of a weight that two pipeline stages have"
    # `print` would write each word by itself, and those of several processes would mix.
    write = 'sys.stdout.write(f"SENT {step} {stage.index} {SENT[0]};")'
    note = f"        {write}\n        SENT[0] = 0\n"
    path = mutant(tmp_path, STAGE, (begin, COUNT + "\n" + begin), (place, note + place))
    model = save_config(tmp_path / "m", "llama", tie_word_embeddings=True)
    flags = (*FEW, "-m", model, "--from-scratch", "--global-batch-size", 8, "-b", 2, "--stages", 4)
    found = re.findall(r"SENT (\d+) (\d+) (\d+);", run(STAGE, 4, *flags, path=path).out)
    hidden_states = 2 * 64 * SIZES["hidden_size"] * 4
    sent = {int(index): int(count) for step, index, count in found if step == "3"}
    one_way = 4 * hidden_states
    tied = SIZES["vocab_size"] * SIZES["hidden_size"] * 4  # of the step before
    assert sent == {0: one_way + tied, 1: 2 * one_way, 2: 2 * one_way, 3: one_way + tied}


# Checkpoints

STEADY = (*SMALL, "--log-freq", "1", "--dtype", "fp32", "--lr-scheduler", "constant")
STEADY += ("--warmup-steps", "5")
WALK = [
    ("01-single-gpu", 1, ()),
    (STAGE, 4, ("--stages", 4)),
    (STAGE, 4, ("--stages", 2, "--schedule", "gpipe")),
    (STAGE, 1, ("--stages", 1)),
    ("07-tensor-parallel", 2, ()),
    (STAGE, 2, ("--stages", 2)),
    ("01-single-gpu", 1, ()),
]


@pytest.mark.law3
@pytest.mark.slow
def test_a_run_changes_its_pipeline_stages(curve, tmp_path):
    """Three steps on each, with one weight at both ends of the pipeline. The curve is that of stage
    01, and so is the model at the end."""
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
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_export_is_the_trained_model(tmp_path, tied):
    """`from_pretrained` opens it, and its logits are those of the same run on one process. The
    evaluation and the sample are the same as well."""
    model = save_config(tmp_path / "m", "llama", tie_word_embeddings=tied)
    tokens = torch.arange(32)[None] * 7 % 1024
    logits, evaluations, samples = {}, {}, {}
    flags = (*FEW, "--save-dir", tmp_path, "-m", model, "--from-scratch")
    for stage, processes, more in (("03-fsdp", 1, ()), (STAGE, 4, ("--stages", 2))):
        out = run(stage, processes, *flags, "-e", stage, *more, sampled=True).out
        samples[stage] = out.split("what the model writes after it:")[1].splitlines()[0]
        evaluations[stage] = metrics(tmp_path / stage)[3]["eval/loss"]
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / stage / "final_model")
        logits[stage] = exported(tokens).logits
    assert torch.allclose(logits["03-fsdp"], logits[STAGE], atol=1e-5)
    assert evaluations[STAGE] == pytest.approx(evaluations["03-fsdp"], rel=1e-6)
    assert samples[STAGE] == samples["03-fsdp"]


@pytest.mark.law1
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_pretrained_weights_reach_the_pipeline_stage_that_has_them(curve, tmp_path, tied):
    config = config_of("qwen3", vocab_size=1025, tie_word_embeddings=tied)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "m")
    save_tokenizer(tmp_path / "m")
    one = curve("01-single-gpu", 1, *FEW, "-m", tmp_path / "m")
    split = curve(STAGE, 4, *FEW, "-m", tmp_path / "m", "--stages", 2)
    assert_same_curve(one, split, range(1, 4))


# A pipeline stage that dies


@pytest.mark.law4
def test_a_pipeline_stage_that_is_killed_ends_the_run(tmp_path, curve):
    """The others wait for what it would have sent. torchrun ends them, and the run goes on from
    its newest checkpoint."""
    flags = (*SMALL, "--max-steps", "12", "--ckpt-freq", "3", "--log-freq", "1", "--stages", 2)
    flags += ("-m", save_config(tmp_path / "m", "llama"), "--from-scratch")
    named = ("-e", "a", "--save-dir", tmp_path)
    faults = {"PYTHONPATH": str(FAULTS), "STRIKE_RANK": "1"}
    faults["STRIKE"] = "kill open step-00000006.tmp/__1_0.distcp 1"
    struck = run(STAGE, 2, *flags, *named, check=False, **faults)
    assert struck.returncode != 0
    again = run(STAGE, 2, *flags, *named)
    assert f"resumed from {tmp_path}/a/step-00000003" in again.out
    assert same_bits(curve(STAGE, 2, *flags), metrics(tmp_path / "a"), range(1, 13))


# Bad input

TWO = ("--stages", 2)
REFUSED = [
    ("gpt2", {}, TWO, "--model-name: use 03-fsdp, gpt2 is none of llama, mistral,"),
    ("llama", {"num_hidden_layers": 1}, TWO, "--stages 2: the model has only 1 blocks"),
    ("llama", {}, ("--stages", 3), "--stages 3: does not divide 2 processes"),
    ("llama", {}, ("--dtype", "fp16"), "--dtype fp16: gradients are not scaled here"),
]


@pytest.mark.parametrize(("architecture", "sizes", "flags", "message"), REFUSED)
def test_what_cannot_be_split_ends_in_one_line(tmp_path, architecture, sizes, flags, message):
    folder = save_config(tmp_path / "m", architecture, **sizes)
    result = run(STAGE, 2, *FEW, "-m", folder, "--from-scratch", *flags, check=False)
    assert result.returncode != 0
    [line] = result.errors
    assert message in line


@pytest.mark.parametrize(("name", "wrong", "right"), [("batch_size", 2, 1), ("lr", 1.0, 0.002)])
def test_ranks_with_different_flags(tmp_path, name, wrong, right):
    """As with another command on another machine. The pipeline stages would wait for each other, or
    each would train with a learning rate of its own."""
    line = "    main(parse_args())\n"
    other = f"    args = parse_args()\n    if LOCAL_RANK == 0:\n        args.{name} = {wrong!r}\n"
    path = mutant(tmp_path, STAGE, (line, f"{other}    main(args)\n"))
    result = run(STAGE, 2, *FEW, path=path, check=False)
    said = f"{name} is {wrong}, but {right} on rank 1: give all ranks the same flags and files"
    assert result.errors == [f"train-llm.py: error: {said}"]

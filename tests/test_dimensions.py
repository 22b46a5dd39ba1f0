"""Stages 07 to 10 split layers, a pipeline, sequences or experts over ranks, and compute what one
process computes. Each stage has rows in the tables below, and the tests are the same for all.

What a rank holds and sends is counted in test_traffic.py, and lines that are broken are rows of
benchmarks/traps.py."""

import copy
from types import SimpleNamespace

import numpy
import pytest
import torch
import transformers
from conftest import (
    FAULTS,
    SMALL,
    assert_same_curve,
    config_of,
    default_sequences,
    exact,
    load,
    metrics,
    mutant,
    run,
    same_bits,
    save_config,
    save_one_sided,
    save_rows,
    save_tokenizer,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

TENSOR, PIPELINE = "07-tensor-parallel", "08-pipeline-parallel"
CONTEXT, EXPERT = "09-context-parallel", "10-expert-parallel"
ONE, FSDP = "01-single-gpu", "03-fsdp"
SPLIT = [TENSOR, PIPELINE, CONTEXT, EXPERT]
# A step of stage 08 needs as many micro-batches as there are pipeline stages.
BATCH = {PIPELINE: ("-b", 1)}
SIX = (*SMALL, "--max-steps", 6, "--dtype", "fp32", "--lr", "2e-3")
FEW = (*SMALL, "--max-steps", 3, "--dtype", "fp32")
# The small models of the tests, by stage: one weight at both ends of the pipeline, a mixture.
MODELS = {
    TENSOR: ("llama", {"tie_word_embeddings": True}),
    PIPELINE: ("llama", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    CONTEXT: ("llama", {"tie_word_embeddings": True}),
    EXPERT: ("mixture", {}),
}
# AdamW divides a gradient by its size, so a wrong factor shows in the norm and not in the loss.
REL_NORM = {EXPERT: 1e-5}
slow = pytest.mark.slow


def rows(table, quick=()):
    """Parameters of a test: the values of each stage's table, behind stage and name. All but those
    named in `quick` are slow."""
    params = []
    for stage, cases in table.items():
        for name, values in cases.items():
            marks = () if (stage, name) in quick else slow
            params.append(pytest.param(stage, *values, id=f"{stage[:2]}: {name}", marks=marks))
    return params


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


def trained(folder, stage, processes, *flags, edits=(), check=True):
    """The metrics of a copy of a stage with `edits`, and how the run ended."""
    path = mutant(folder / stage, stage, *edits)
    named = ("-e", "a", "--save-dir", folder / stage, "--log-freq", 1)
    result = run(stage, processes, *flags, *named, path=path, check=check)
    log = folder / stage / "a" / "metrics.jsonl"
    return (metrics(log.parent) if log.exists() else {}), result


@pytest.mark.law1
@slow
@pytest.mark.parametrize("stage", [TENSOR, PIPELINE, CONTEXT])
def test_fifty_steps(curve, from_scratch, stage):
    """On two groups of two ranks. What is split equally leaves a rank 1 / W of the state."""
    flags = ("--max-steps", 50, "--dtype", "fp32", *SMALL, *BATCH.get(stage, ()))
    if stage == PIPELINE:  # another weight at each end
        flags += from_scratch("llama", num_hidden_layers=4)
    one, split = curve(ONE, 1, *flags), curve(stage, 4, *flags)
    assert_same_curve(one, split, range(1, 51), cut=stage != PIPELINE)
    if stage != PIPELINE:
        whole = one[50]["memory/state_gb"]
        assert split[50]["memory/state_gb"] == pytest.approx(whole / 4, rel=0.05)


@pytest.mark.law1
@slow
def test_fifty_steps_of_a_mixture(mixture, tmp_path):
    """In double precision, since in fp32 a route may flip. A rank has 1 / W of the state."""
    flags = ("--max-steps", 50, "--dtype", "fp32", *SMALL, *mixture)
    one, _ = trained(tmp_path / "one", ONE, 1, *flags, edits=DOUBLE + ON_ONE)
    split, _ = trained(tmp_path / "split", EXPERT, 4, *flags, edits=DOUBLE + ON_SEVERAL)
    # The loss is added up and logged in fp32, the norm is not.
    assert_same_curve(one, split, range(1, 51), rel_loss=1e-6, rel_norm=1e-10)
    whole = one[50]["memory/state_gb"]
    assert split[50]["memory/state_gb"] == pytest.approx(whole / 4, rel=0.01)


# Processes, flags, those that only this stage has, and sizes of the model. None is `tiny`.
MASKED = "masked labels"
ODD = "a batch that the groups do not divide"
GATHERED = "gathered once"
KEEP = "--no-reshard-after-forward"
AGAIN = "--activation-checkpointing"
CASES = {
    TENSOR: {
        MASKED: (4, "-b 2", "", None),
        ODD: (4, "--global-batch-size 7 -b 3", "", None),
        "a group that has no sequence": (4, "--global-batch-size 1", "", None),
        "tokens that the ranks do not divide": (4, f"-s 31 -b 3 {AGAIN}", "", None),
        GATHERED: (4, "-b 1", KEEP, None),
    },
    PIPELINE: {
        MASKED: (4, "-b 2", "", {}),
        ODD: (4, "--global-batch-size 7", "", {}),
        "a shorter last micro-batch": (4, "--global-batch-size 10 -b 2", "--schedule gpipe", {}),
        GATHERED: (4, AGAIN, KEEP, {}),
        "three blocks on two pipeline stages": (4, "", "", None),
        "four pipeline stages": (4, "", "--stages 4", {}),
    },
    CONTEXT: {
        MASKED: (2, "-b 2", "", None),
        "masked labels in two groups": (4, "-b 2", "", None),
        ODD: (4, "--global-batch-size 7 -b 3", "", None),
        "a group that has no sequence": (4, "--global-batch-size 1", "", None),
        "activation checkpointing": (2, AGAIN, "", None),
        GATHERED: (4, "-b 1", KEEP, None),
        "groups of one rank": (2, "", "--context-size 1", None),
        "an evaluation between the steps": (4, "--eval-freq 2", "--context-size 4", None),
    },
    EXPERT: {
        MASKED: (2, "-b 2", "", {}),
        "masked labels in shard groups of two": (4, "-b 1", "", {}),
        ODD: (4, "--global-batch-size 7 -b 3", "", {}),
        "a rank that has no sequence": (4, "--global-batch-size 1", "", {}),
        "activation checkpointing": (2, f"-b 1 {AGAIN}", "", {}),
        GATHERED: (4, f"-b 1 --eval-freq 2 {AGAIN}", KEEP, {}),
        "a single process": (1, "", "", {}),
        "shards that are not even": (3, "", "", {}),
        "all ranks in a row": (4, "--eval-freq 2", "--expert-size 4", {}),
        "three experts for a shard group of two": (4, "", "", {"num_local_experts": 6}),
        "three ranks in a row": (3, "-b 2", "--expert-size 3", {"num_local_experts": 6}),
        "every expert for each token": (4, "--max-steps 12", "", {"num_experts_per_tok": 8}),
    },
}


@pytest.mark.law1
@pytest.mark.parametrize(
    ("stage", "processes", "more", "own", "sizes"),
    rows(CASES, quick=[(stage, MASKED) for stage in SPLIT]),
)
def test_the_same_curve(
    request, curve, from_scratch, masked_data, stage, processes, more, own, sizes
):
    """In groups of two ranks, if the case does not say otherwise."""
    flags = (*SIX, *BATCH.get(stage, ()), *more.split())
    if sizes is not None:
        architecture, base = MODELS[stage]
        flags += from_scratch(architecture, **base | sizes)
    if MASKED in request.node.callspec.id:
        flags += ("-d", masked_data)
    one, split = curve(ONE, 1, *flags), curve(stage, processes, *flags, *own.split())
    assert_same_curve(one, split, one, rel_norm=REL_NORM.get(stage, 1e-4))


# Tokens that two ranks do not divide, evaluations between the steps, and in a mixture all experts
# for each token: in one with two nearly equal ones a route may flip.
COMPILED = {
    TENSOR: ("-s", 31, "-b", 8),
    PIPELINE: ("--eval-freq", 2, "--activation-checkpointing"),
    CONTEXT: ("-b", 2, "--eval-freq", 2, "--activation-checkpointing"),
    EXPERT: ("-b", 2, "--eval-freq", 2, "--activation-checkpointing"),
}


@pytest.mark.law1
@slow
@pytest.mark.parametrize("stage", SPLIT)
def test_compiled_as_eager(curve, from_scratch, masked_data, tmp_path, stage):
    """In stage 07 also from the second run on. With PyTorch's cache a rank with another number of
    tokens would compute with the code of another (pytorch#188390)."""
    architecture, sizes = MODELS[stage]
    sizes = {"num_experts_per_tok": 8} if stage == EXPERT else sizes
    flags = (*SIX, *BATCH.get(stage, ()), *COMPILED[stage], *from_scratch(architecture, **sizes))
    flags += () if stage == TENSOR else ("-d", masked_data)
    eager = curve(ONE, 1, *flags)
    flags += exact(stage, 2) if stage in (TENSOR, PIPELINE) else ("--no-reshard-after-forward",)
    for name in ("first", "second")[: 1 + (stage == TENSOR)]:
        named = ("-e", name, "--save-dir", tmp_path, "--log-freq", 1, "--compile")
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
        run(stage, 2, *exact(stage, 2), *flags, *named, **cache)
        assert_same_curve(eager, metrics(tmp_path / name), eager)


@pytest.mark.law1
@slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [CONTEXT, EXPERT])
def test_a_smaller_type_has_almost_the_curve_of_fp32(curve, stage, dtype, mixture):
    flags = (*SIX, *(mixture if stage == EXPERT else ()))
    one, small = curve(ONE, 1, *flags), curve(stage, 2, *flags, "--dtype", dtype)
    assert_same_curve(one, small, one, rel_loss=1e-3, rel_norm=0.1)


@pytest.mark.law1
@slow
@pytest.mark.parametrize("expert_size", [1, 2])
def test_in_bf16_the_first_step_of_a_mixture_is_that_of_stage_03(curve, mixture, expert_size):
    """What is computed in fp32 in stage 03 is so in stage 10, such as the sum of the outputs of
    experts. With router weights in bf16 the norm would differ by 2e-4."""
    bf16 = (*SIX, *mixture, "--dtype", "bf16")
    other = curve(FSDP, 2, *bf16)[1]
    split = curve(EXPERT, 2, *bf16, "--expert-size", expert_size)[1]
    for name, bound in (("train/loss", 1e-6), ("train/grad_norm", 1e-5)):
        assert split[name] == pytest.approx(other[name], rel=bound)


@pytest.mark.law1
@slow
def test_a_parameter_without_a_gradient_is_left_alone(curve, from_scratch):
    """Some models freeze a parameter: that of the router's correction in ERNIE 4.5."""
    sizes = {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32}
    flags = (*FEW, *from_scratch("ernie4_5_moe", **sizes, moe_layer_start_index=0))
    one = curve(ONE, 1, *flags)
    assert_same_curve(one, curve(EXPERT, 2, *flags), one, rel_norm=1e-5)


MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.law1
@pytest.mark.parametrize(
    ("stage", "processes", "tied"),
    [
        (TENSOR, 2, True),
        pytest.param(PIPELINE, 4, True, marks=slow),
        pytest.param(PIPELINE, 4, False, marks=slow),
        pytest.param(CONTEXT, 4, True, marks=slow),
        pytest.param(EXPERT, 4, False, marks=slow),
    ],
)
def test_pretrained_weights_reach_the_ranks_that_have_them(curve, tmp_path, stage, processes, tied):
    """bf16 weights of a Qwen 3 with an odd vocabulary, as a hub has them."""
    architecture, sizes = ("qwen3_moe", MOE) if stage == EXPERT else ("qwen3", {})
    sizes = sizes | {"num_hidden_layers": 4, "vocab_size": 1025, "tie_word_embeddings": tied}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config_of(architecture, **sizes), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "m")
    save_tokenizer(tmp_path / "m")
    flags = (*SIX, *BATCH.get(stage, ()), "-m", tmp_path / "m")
    one, split = curve(ONE, 1, *flags), curve(stage, processes, *flags)
    assert_same_curve(one, split, one)
    assert split[1]["train/grad_norm"] == pytest.approx(one[1]["train/grad_norm"], rel=1e-5)


# Gradients of each parameter

DUMP = """
        full = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            gradient = parameter.grad
            full[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        if __import__("os").environ.get("RANK", "0") == "0":
            torch.save(full, "{TO}")
        sys.exit()
"""
# Behind the backward passes of a step, and in stage 10 where gradients of experts were divided.
PLACE = "        # Update. The gradients are clipped"
DIVIDED = "        # Each element of a gradient is on one rank only."
# A new model's biases are zero, which hides mistakes.
NEW_MODEL = "        return transformers.AutoModelForCausalLM.from_config(config, **options)\n"
BIASES = """        model = transformers.AutoModelForCausalLM.from_config(config, **options)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.1)
        return model
"""


@pytest.fixture(scope="session")
def gradients(tmp_path_factory):
    """A stage's gradients of the first step, by name, before they are clipped."""
    done = {}

    def gradients_of(stage, processes, *flags):
        key = (stage, processes, *flags)
        if key not in done:
            folder = tmp_path_factory.mktemp("gradients")
            file = folder / "gradients.pt"
            place = DIVIDED if stage == EXPERT else PLACE
            edits = [(place, DUMP.replace("{TO}", str(file)) + place), (NEW_MODEL, BIASES)]
            run(stage, processes, *flags, path=mutant(folder, stage, *edits))
            done[key] = torch.load(file, weights_only=True)
        return done[key]

    return gradients_of


# Gemma 2 has norms behind attention and MLP, Qwen 3 norms of heads, Starcoder 2 biases everywhere,
# Cohere one norm for attention and MLP.
PLANNED = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "granite", "cohere"]
PLANNED += ["starcoder2", "phi", "olmo", "gpt_neox", "nemotron", "arcee", "seed_oss", "exaone4"]
PLANNED += ["smollm3", "gemma"]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
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
GPT_OSS = {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8}
# Qwen 3 has norms of heads, OLMoE does not normalise the weights, GPT-OSS has biases and transposed
# matrices, DeepSeek and Qwen 2 shared experts, DeepSeek also a dense block, Nemotron no gates.
MIXTURES = {
    "mixtral": {},
    "qwen3_moe": MOE,
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 32},
    "olmoe": MOE,
    "gpt_oss": GPT_OSS,
    "deepseek_v3": DEEPSEEK,
    "nemotron_h": NEMOTRON,
}
# Processes, the size of a group, architecture and sizes. Tied embeddings in every other one.
ARCHITECTURES = {
    TENSOR: {
        "llama, two groups": (4, 2, "llama", {"tie_word_embeddings": True}),
        "qwen3, two groups": (4, 2, "qwen3", {"tie_word_embeddings": False}),
    }
    | {
        name: (2, 2, name, {"tie_word_embeddings": number % 2 == 1})
        for number, name in enumerate(PLANNED)
    },
    CONTEXT: {
        "llama": (2, 2, "llama", {}),
        "llama, a head of keys and values": (4, 4, "llama", {"num_key_value_heads": 1}),
        "llama, positions of Llama 3": (4, 4, "llama", {"rope_parameters": LLAMA3_ROPE}),
        "qwen3, tied": (2, 2, "qwen3", {"tie_word_embeddings": True}),
        "gpt2": (4, 4, "gpt2", {}),
        "gemma": (2, 2, "gemma", {}),
        "mixtral": (4, 4, "mixtral", {"num_local_experts": 4}),
        "gpt_neox": (2, 2, "gpt_neox", {}),
    },
    EXPERT: {
        f"{name} on {processes}": (processes, 2, name, sizes)
        for name, sizes in MIXTURES.items()
        for processes in (2, 4)
    },
}
QUICK = [(TENSOR, "llama, two groups"), (CONTEXT, "llama"), (EXPERT, "qwen3_moe on 2")]
SIZE_FLAG = {TENSOR: "--tensor-size", CONTEXT: "--context-size", EXPERT: "--expert-size"}


@pytest.mark.law1
@pytest.mark.parametrize(
    ("stage", "processes", "size", "architecture", "sizes"), rows(ARCHITECTURES, QUICK)
)
def test_every_gradient_is_that_of_one_process(
    gradients, from_scratch, stage, processes, size, architecture, sizes
):
    """Also of biases, of norms, whose gradients are sums over the ranks, and of experts."""
    flags = ("-s", 32, "--global-batch-size", 4, "-b", 1 if stage == EXPERT else 2)
    flags += ("--max-steps", 1, "--eval-sequences", 2, *from_scratch(architecture, **sizes))
    one = gradients(ONE, 1, *flags)
    split = gradients(stage, processes, *flags, SIZE_FLAG[stage], size)
    assert split.keys() == one.keys()
    has_norms = any("norm" in name or "ln_" in name for name in one)
    assert has_norms or architecture == "olmo"  # its norms have no weights
    assert any("expert" in name for name in one) or stage != EXPERT
    largest = max(gradient.norm() for gradient in one.values() if gradient is not None)
    for name, gradient in one.items():
        if gradient is None:
            assert split[name] is None or split[name].count_nonzero() == 0, name
            continue
        error = (split[name] - gradient).norm()
        assert error <= 2e-5 * gradient.norm() + 1e-7 * largest, name


# Pipeline stages, one after the other in one process

LLAMA_LIKE = ["llama", "mistral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "smollm3"]


@pytest.fixture(scope="session")
def pipeline():
    return load(PIPELINE)


def parts_of(pipeline, model, num_stages):
    """Copies of a model, each with the blocks of one pipeline stage."""
    parts = []
    for index in range(num_stages):
        part = copy.deepcopy(model)
        stage = SimpleNamespace(index=index, last=num_stages - 1)
        stage.is_first, stage.is_last = index == 0, index == num_stages - 1
        pipeline.keep_stage(part, list(part.model.layers), stage)
        parts.append(part)
    return parts


@pytest.mark.law1
@pytest.mark.parametrize(
    "architecture", [x if x == "llama" else pytest.param(x, marks=slow) for x in LLAMA_LIKE]
)
@pytest.mark.parametrize(("num_stages", "tied"), [(2, True), (4, False)])
def test_every_gradient_of_a_pipeline_is_that_of_the_whole_model(
    pipeline, architecture, num_stages, tied
):
    """The logits have the same bits, and the parameters have the names of checkpoints."""
    assert set(pipeline.LLAMA_LIKE) == set(LLAMA_LIKE)
    config = config_of(architecture, num_hidden_layers=4, tie_word_embeddings=tied)
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tokens = torch.arange(64).view(2, 32) * 7 % 1024
    logits = whole(input_ids=tokens, use_cache=False).logits
    logits.square().mean().backward()

    parts, inputs, outputs = parts_of(pipeline, whole, num_stages), [tokens], []
    for index, part in enumerate(parts):
        name = "input_ids" if index == 0 else "inputs_embeds"
        outputs.append(part(**{name: inputs[index]}, use_cache=False).logits)
        inputs.append(outputs[index].detach().requires_grad_())
    assert torch.equal(outputs[-1], logits)
    inputs[-1].square().mean().backward()
    for index in reversed(range(num_stages)):
        outputs[index].backward(inputs[index + 1].grad)

    largest = max(p.grad.norm() for p in whole.parameters() if p.grad is not None)
    named = [dict(part.named_parameters()) for part in parts]
    for name, parameter in whole.named_parameters():
        copies = [of_part[name] for of_part in named if name in of_part]
        is_tied = tied and parameter is whole.get_input_embeddings().weight
        assert len(copies) == (2 if is_tied else 1), name
        if parameter.grad is not None:
            error = (sum(copy.grad for copy in copies) - parameter.grad).norm()
            assert error <= 1e-5 * parameter.grad.norm() + 1e-7 * largest, name
    assert set().union(*named) == set(dict(whole.named_parameters()))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"num_hidden_layers": 3}, [2, 1]),
        ({"num_hidden_layers": 6}, [2, 2, 1, 1]),
        # An output layer that is as much work as several blocks.
        ({"num_hidden_layers": 8, "vocab_size": 4096}, [7, 1]),
        ({"num_hidden_layers": 8, "vocab_size": 4096}, [3, 2, 2, 1]),
        ({"num_hidden_layers": 4, "vocab_size": 4096}, [1, 1, 1, 1]),
        ({"num_hidden_layers": 4}, [4]),
    ],
)
def test_blocks_are_divided_by_their_work(pipeline, sizes, expected):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of("llama", **sizes))
    parts = parts_of(pipeline, model, len(expected))
    kept = [[not isinstance(m, pipeline.PassThrough) for m in part.model.layers] for part in parts]
    assert list(map(sum, kept)) == expected


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
def test_no_pipeline_stage_has_much_more_work(pipeline, layers, sizes, num_stages, most):
    """By the parameters of matrices; embeddings are looked up, which is no work."""
    names = ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads")
    sizes = dict(zip((*names, "num_key_value_heads", "head_dim"), sizes, strict=True))
    with torch.device("meta"):
        config = transformers.LlamaConfig(**sizes, num_hidden_layers=layers)
        model = AutoModelForCausalLM.from_config(config)
    work = []
    for part in parts_of(pipeline, model, num_stages):
        matrices = [m.weight for m in part.modules() if isinstance(m, torch.nn.Linear)]
        work.append(sum(matrix.numel() for matrix in matrices))
    assert max(work) / (sum(work) / num_stages) < most


@slow
@pytest.mark.parametrize(("num_stages", "tied"), [(2, True), (4, False)])
def test_the_state_is_that_of_the_largest_pipeline_stage(
    pipeline, curve, from_scratch, num_stages, tied
):
    """16 bytes for each of its parameters, divided by the number of pipelines."""
    sizes = {"num_hidden_layers": 4, "tie_word_embeddings": tied}
    flags = (*FEW, "-b", 1, *from_scratch("llama", **sizes), "--stages", num_stages)
    measured = curve(PIPELINE, 4, *flags)[3]["memory/state_gb"] * 1e9
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config_of("llama", **sizes))
    parts = parts_of(pipeline, whole, num_stages)
    largest = max(sum(p.numel() for p in part.parameters()) for part in parts)
    assert measured == pytest.approx(16 * largest * num_stages / 4, rel=0.02)


# Which tokens and which experts a rank has


@pytest.mark.parametrize("size", range(1, 7))
def test_each_token_is_on_one_rank_and_all_ranks_have_the_same_work(size):
    """The work of attention: the pairs of a token and one that it sees."""
    stage = load(CONTEXT)
    ranks = [
        SimpleNamespace(
            get_local_rank=lambda rank=rank: rank,
            size=lambda mesh_dim=None: size,
            device_type="cpu",
        )
        for rank in range(size)
    ]
    chunks = [chunk for rank in ranks for chunk in stage.own_chunks(rank)]
    assert sorted(chunks) == list(range(2 * size))

    length = 10 * size
    positions = [stage.own_positions(length, rank).tolist() for rank in ranks]
    assert sorted(sum(positions, [])) == list(range(length))
    pairs = [sum(position + 1 for position in own) for own in positions]
    assert pairs == [length * (length + 1) / 2 / size] * size


@pytest.mark.parametrize(
    ("num_ranks", "shape", "dimension"),
    [(1, (3, 8), 0), (2, (4, 8), 0), (2, (3, 8), 1), (4, (2, 8, 5), 1), (2, (3, 5), 0)],
)
def test_shards_of_experts_are_even_where_a_dimension_can_be_divided(num_ranks, shape, dimension):
    """Three experts on two ranks are cut in the other dimension. Cut by experts, one of the ranks
    would have twice as much as the other."""
    parameter = SimpleNamespace(to_local=lambda: torch.empty(shape))
    assert load(EXPERT).choose_dimension(num_ranks, parameter).dim == dimension


# Loads of experts that are far from even

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
# A collective that waits for longer than this fails. Only broken copies have it.
IMPATIENT = ("timedelta(hours=12)", "timedelta(seconds=60)")


@pytest.fixture(scope="module")
def one_sided(tmp_path_factory):
    return ("-m", save_one_sided(tmp_path_factory.mktemp("one-sided")))


@pytest.mark.law1
@pytest.mark.parametrize(
    ("processes", "expert_size", "edits"),
    [
        (2, 2, (EAGER,)),
        pytest.param(2, 2, (), marks=slow),
        pytest.param(4, 2, (EAGER,), marks=slow),
        pytest.param(4, 4, (), marks=slow),
        pytest.param(4, 4, (EAGER,), marks=slow),
    ],
)
def test_all_tokens_choose_experts_of_one_rank(
    curve, one_sided, tmp_path, processes, expert_size, edits
):
    """No expert of the other ranks has a token, in no step. They go on all the same."""
    one = curve(ONE, 1, *SIX, *one_sided)
    flags = (*SIX, *one_sided, "--expert-size", expert_size)
    split, _ = trained(tmp_path, EXPERT, processes, *flags, edits=edits)
    assert_same_curve(one, split, one, rel_norm=1e-5)
    for line in split.values():
        assert line["train/max_load_of_expert"] == 8 / 2
        assert line["train/min_load_of_expert"] == 0
        assert line["train/max_load_of_rank"] == expert_size


@pytest.mark.law1
@slow
def test_without_the_row_of_zeros_ranks_wait_for_each_other(one_sided, tmp_path):
    """Until a collective has waited for longer than its timeout."""
    edits = [EAGER, IMPATIENT, *NO_ROW]
    lines, result = trained(tmp_path, EXPERT, 2, *FEW, *one_sided, edits=edits, check=False)
    assert result.returncode != 0
    assert not lines


# The log of a mixture

LOADS = ("max_load_of_expert", "min_load_of_expert", "max_load_of_rank")
COUNT = "    if torch.is_grad_enabled():\n        experts.load += counts\n"
WRONG_LOADS = {
    "of the tokens of one rank": ("            dist.all_reduce(load)\n", ""),
    "of all steps since the first": (
        "                module.load.zero_()\n",
        "                pass\n",
    ),
    "with the evaluations": (COUNT, "    experts.load += counts\n"),
    "of the ranks of a shard group": (
        "load.unflatten(1, (expert_size, -1)).mean(dim=2)",
        "load[:, ::2]",
    ),
}


def loads_counted(sequences, expert_size):
    """The three loads, from the routers of a model that one process has made."""
    config = load(EXPERT).load_config(load(EXPERT).TINY)
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
    flags = (*SMALL, "-b", 3, "--lr", "1e-30", "--max-steps", 3, "--eval-freq", 1, *flags)
    path = mutant(folder / "copy", EXPERT, *edits)
    named = ("-e", "a", "--save-dir", folder, "--log-freq", 3)
    run(EXPERT, processes, *flags, *named, path=path)
    lines = metrics(folder / "a")
    return [[lines[step][f"train/{name}"] for name in LOADS] for step in (1, 3)]


def loads_expected(expert_size):
    train, _ = default_sequences(64)
    order = numpy.random.default_rng((0, 0)).permutation(len(train))
    batches = (order[:8], order[8:24])
    return [pytest.approx(loads_counted(train[batch], expert_size), rel=1e-6) for batch in batches]


@pytest.mark.parametrize(
    ("processes", "expert_size", "more"),
    [
        (2, 2, ()),
        pytest.param(4, 2, ("--activation-checkpointing",), marks=slow),
        pytest.param(4, 4, (), marks=slow),
    ],
)
def test_the_log_has_the_loads_of_experts_and_ranks(tmp_path, processes, expert_size, more):
    """The share of the tokens of all ranks in the steps since the last line that an expert or a
    rank has had, in the block where it is largest or smallest. 1 is as much as all others."""
    found = loads_logged(tmp_path, processes, "--expert-size", expert_size, *more)
    assert found == loads_expected(expert_size)


@slow
@pytest.mark.parametrize("name", WRONG_LOADS)
def test_wrong_loads_are_noticed(tmp_path, name):
    assert loads_logged(tmp_path, 2, edits=[WRONG_LOADS[name]]) != loads_expected(2)


# Checkpoints, export and sample

STEADY = (*SMALL, "--log-freq", 1, "--dtype", "fp32", "--lr-scheduler", "constant")
STEADY += ("--warmup-steps", 5)
# Stage, processes and its own flags. With six experts these are cut in the other dimension where
# their number does not divide.
WALKS = {
    TENSOR: [
        (ONE, 1, ()),
        (TENSOR, 4, ("--tensor-size", 2)),
        (TENSOR, 4, ("--tensor-size", 4)),
        ("02-ddp", 2, ()),
        (TENSOR, 2, ("--tensor-size", 1)),
        (TENSOR, 2, ("--tensor-size", 2)),
        (ONE, 1, ()),
    ],
    PIPELINE: [
        (ONE, 1, ()),
        (PIPELINE, 4, ("--stages", 4)),
        (PIPELINE, 4, ("--stages", 2, "--schedule", "gpipe")),
        (PIPELINE, 1, ("--stages", 1)),
        (TENSOR, 2, ()),
        (PIPELINE, 2, ("--stages", 2)),
        (ONE, 1, ()),
    ],
    CONTEXT: [
        (FSDP, 2, ()),
        (CONTEXT, 2, ("--context-size", 2)),
        (ONE, 1, ()),
        (CONTEXT, 4, ("--context-size", 4)),
        (CONTEXT, 4, ("--context-size", 2)),
        ("02-ddp", 2, ()),
        (CONTEXT, 2, ("--context-size", 1)),
        (PIPELINE, 2, ()),
        (ONE, 1, ()),
    ],
    EXPERT: [
        (FSDP, 2, ()),
        (EXPERT, 2, ("--expert-size", 2)),
        (FSDP, 4, ()),
        (EXPERT, 4, ("--expert-size", 4)),
        (EXPERT, 4, ("--expert-size", 2)),
        (ONE, 1, ()),
        (EXPERT, 2, ("--expert-size", 1)),
        ("02-ddp", 2, ()),
        (EXPERT, 3, ("--expert-size", 3)),
        ("05-multinode", 2, ()),
    ],
    "six experts": [
        (EXPERT, 4, ("--expert-size", 2)),
        (FSDP, 2, ()),
        (EXPERT, 4, ("--expert-size", 1)),
        (EXPERT, 3, ("--expert-size", 3)),
        (ONE, 1, ()),
    ],
}
# Tied embeddings of 1,025 tokens, which are not divided equally. Each token has all experts.
ODD_VOCABULARY = {"vocab_size": 1025, "tie_word_embeddings": True, "num_hidden_layers": 4}
WALKING = {
    EXPERT: ("mixture", {"num_local_experts": 12, "num_experts_per_tok": 12}),
    "six experts": ("mixture", {"num_local_experts": 6, "num_experts_per_tok": 6}),
}


@pytest.mark.law3
@slow
@pytest.mark.parametrize("walk", WALKS)
def test_a_run_changes_its_stage_and_its_groups(curve, from_scratch, tmp_path, walk):
    """Two steps on each. The curve is that of stage 01."""
    architecture, sizes = WALKING.get(walk, ("llama", ODD_VOCABULARY))
    common = (*STEADY, "-b", 1, *from_scratch(architecture, **sizes))
    named = ("-e", "a", "--save-dir", tmp_path)
    for number, (stage, processes, own) in enumerate(WALKS[walk]):
        flags = (*exact(stage, processes), *common, *named, *own)
        out = run(stage, processes, *flags, "--max-steps", 2 + 2 * number).out
        assert (f"resumed from {tmp_path}/a/step-{2 * number:08d}" in out) == (number > 0)
    resumed, num_steps = metrics(tmp_path / "a"), 2 * len(WALKS[walk])
    assert list(resumed) == list(range(1, num_steps + 1))
    whole = curve(ONE, 1, *common, "--max-steps", num_steps)
    assert_same_curve(whole, resumed, resumed)


def bytes_before_sharding(folder, *edits):
    """Of parameters that a rank has on its device between `split_layers` and FSDP, the most."""
    probe = """    split_layers(model, mesh["tensor"])
    parts = [p.to_local() for p in model.parameters() if not p.is_meta]
    print("bytes", sum(part.nbytes for part in parts))
"""
    path = mutant(folder, TENSOR, ('    split_layers(model, mesh["tensor"])\n', probe), *edits)
    lines = run(TENSOR, 2, *SMALL, "--max-steps", 1, path=path).out.splitlines()
    found = [int(line.split()[1]) for line in lines if line.startswith("bytes ")]
    assert len(found) == 2
    return max(found)


@slow
def test_no_rank_has_its_part_of_all_layers_before_they_are_sharded(tmp_path):
    """Rank 0 has loaded the weights. Of 8 billion parameters in two parts it would have 16 GB."""
    assert bytes_before_sharding(tmp_path / "a") == 0
    # The count sees the halves of the matrices.
    assert bytes_before_sharding(tmp_path / "b", ('    model.to("meta")\n', "")) > 1_000_000


def written_in(out):
    """The sample, without a part of a character at its end, and without what is said of a run."""
    text = out.split("what the model writes after it:")[1]
    return text.partition("\nexported in ")[0].rstrip("\n\ufffd")


@pytest.mark.law3
@pytest.mark.parametrize(
    ("stage", "processes", "tied"),
    [
        pytest.param(TENSOR, 2, True, marks=slow),
        (PIPELINE, 4, True),
        pytest.param(PIPELINE, 4, False, marks=slow),
        pytest.param(CONTEXT, 2, True, marks=slow),
        pytest.param(EXPERT, 4, True, marks=slow),
    ],
)
def test_the_export_is_the_trained_model(tmp_path, stage, processes, tied):
    """The same tensors under the same names as those of stage 03 on one process, the same
    evaluation, and the same text is written. `from_pretrained` opens it."""
    architecture, sizes = MODELS[stage]
    model = save_config(tmp_path / "m", architecture, **sizes | {"tie_word_embeddings": tied})
    # AdamW divides by the size of a gradient, so it turns rounding into differences of the learning
    # rate where a gradient is nearly 0.
    flags = (*FEW, *BATCH.get(stage, ()), "--lr", "2e-4", "--save-dir", tmp_path)
    flags += ("-m", model, "--from-scratch")
    samples, tensors, logits, evaluations = [], [], [], []
    tokens = torch.arange(32)[None] * 7 % 1024
    for name, number in ((FSDP, 1), (stage, processes)):
        out = run(name, number, *flags, "-e", name, *exact(name, number), sampled=True).out
        samples.append(written_in(out))
        evaluations.append(metrics(tmp_path / name)[3]["eval/loss"])
        folder = tmp_path / name / "final_model"
        tensors.append(load_file(folder / "model.safetensors"))
        exported = AutoModelForCausalLM.from_pretrained(folder)
        assert exported.config._attn_implementation == "sdpa"
        logits.append(exported(tokens).logits)
    one, split = tensors
    assert one.keys() == split.keys()
    for name in one:
        assert torch.allclose(one[name], split[name], atol=1e-5), name
    assert torch.allclose(*logits, atol=1e-4)
    assert evaluations[1] == pytest.approx(evaluations[0], rel=1e-6)
    assert samples[1].startswith(samples[0]) if stage == CONTEXT else samples[1] == samples[0]


@slow
def test_a_sample_goes_on_where_the_ranks_cannot_share_its_prompt(tmp_path):
    """Where the ranks could not share its tokens equally, it has a few more tokens."""
    prompt, data = 34, []
    for number in range(40):
        ids = [(7 * number + 3 * i) % 250 + 1 for i in range(128)]
        data.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    flags = (*FEW, "-s", 128, "-d", save_rows(tmp_path / "rows", data))
    samples = []
    for stage, processes, own in ((FSDP, 2, ()), (CONTEXT, 4, ("--context-size", 4))):
        samples.append(written_in(run(stage, processes, *flags, *own, sampled=True).out))
    assert samples[1].startswith(samples[0])


@pytest.mark.law4
@slow
def test_a_pipeline_stage_that_is_killed_ends_the_run(tmp_path, curve, from_scratch):
    """The others wait for what it would have sent. torchrun ends them, and the run goes on from
    its newest checkpoint."""
    flags = (*SMALL, "--max-steps", 12, "--ckpt-freq", 3, "--log-freq", 1, "--stages", 2, "-b", 1)
    flags += from_scratch("llama", num_hidden_layers=4)
    named = ("-e", "a", "--save-dir", tmp_path)
    faults = {"PYTHONPATH": str(FAULTS), "STRIKE_RANK": "1"}
    faults["STRIKE"] = "kill open step-00000006.tmp/__1_0.distcp 1"
    struck = run(PIPELINE, 2, *flags, *named, check=False, **faults)
    assert struck.returncode != 0
    again = run(PIPELINE, 2, *flags, *named)
    assert f"resumed from {tmp_path}/a/step-00000003" in again.out
    assert same_bits(curve(PIPELINE, 2, *flags), metrics(tmp_path / "a"), range(1, 13))


# fp16

OVERFLOW = """        if step == 2 and dist.get_rank() == 1:
            {PLACE}.grad.to_local().view(-1)[0] = torch.inf
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
ANYWHERE = "next(model.parameters())"


@slow
@pytest.mark.parametrize(
    ("stage", "processes", "place"),
    [
        (TENSOR, 2, ANYWHERE),
        (CONTEXT, 2, ANYWHERE),
        (EXPERT, 2, "of_experts[0]"),
        (EXPERT, 4, "of_experts[0]"),
        (EXPERT, 2, "others[0]"),
        (EXPERT, 4, "others[0]"),
    ],
)
def test_an_overflow_of_fp16_on_one_rank_skips_the_step_on_all(tmp_path, stage, processes, place):
    """Also on the ranks that have no part of the expert with it."""
    edits = [
        ("        scaler.unscale_(optimizer)\n", OVERFLOW.replace("{PLACE}", place)),
        ("        scaler.update()\n", OVERFLOWED),
        ("GradScaler(device.type, ", "GradScaler(device.type, init_scale=256.0, "),
    ]
    path = mutant(tmp_path, stage, *edits)
    flags = (*SMALL, "--max-steps", 3, "--dtype", "fp16", *exact(stage, processes))
    out = run(stage, processes, *flags, path=path).out
    lines = [line.split("CHANGED ")[1] for line in out.splitlines() if "CHANGED" in line]
    every = [[True] * processes, [False] * processes, [True] * processes]
    assert lines == [f"{i + 1} {every[i]} {scale}" for i, scale in enumerate((256.0, 128.0, 128.0))]


# What cannot be split

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 128,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
KIND = "attention of kind {} cannot be split, use 03-fsdp"
LLAMA4 = {"num_local_experts": 8, "intermediate_size_mlp": 64, "head_dim": 8}
LONGCAT = {"n_routed_experts": 8, "num_layers": 1, "zero_expert_num": 2}
JETMOE = {"num_local_experts": 8, "num_experts_per_tok": 2, "kv_channels": 8}
NO_EXPERTS = "{} has no experts to split, use 03-fsdp"
# Flags, architecture and sizes, and what the one line of the error has. Without a message it is an
# error of PyTorch's, before the first step. Llama has no experts. Those of the others have another
# interface: Llama 4 gives all tokens to each of them, JetMoe has some in its attention, and some of
# LongCat's compute nothing.
REFUSED = {
    TENSOR: {
        "groups": ("--tensor-size 3", "", {}, "--tensor-size 3: does not divide 2 processes"),
        "gpt2": ("", "gpt2", {}, "--model-name: transformers has no plan to split gpt2, use 03"),
        "a head": ("", "llama", {"num_key_value_heads": 1}, "2: must divide the 1 heads of keys"),
        "olmo 2": ("", "olmo2", {}, "colwise_gather_output, the plan for model.layers.0.self_at"),
        "odd features": ("", "llama", {"intermediate_size": 127}, ""),
        "layers left out": ("", "mixtral", {}, ""),
    },
    PIPELINE: {
        "groups": ("--stages 3", "", {}, "--stages 3: does not divide 2 processes"),
        "gpt2": ("", "gpt2", {}, "--model-name: use 03-fsdp, gpt2 is none of llama, mistral,"),
        "a block": ("", "llama", {"num_hidden_layers": 1}, "--stages 2: the model has only 1 bl"),
        "fp16": ("--dtype fp16", "", {}, "--dtype fp16: gradients are not scaled here"),
    },
    CONTEXT: {
        "groups": ("--context-size 3", "", {}, "--context-size 3: does not divide 2 processes"),
        "length": ("-s 62", "", {}, "--seq-length 62: must be a multiple of twice --context-size"),
        "eager": ("--attn eager", "", {}, KIND.format("eager")),
        "mistral": ("", "mistral", {"sliding_window": 8}, "see all tokens before them, use 03"),
        "gemma 3": ("", "gemma3_text", {}, KIND.format("sliding_attention")),
        "qwen 2": ("", "qwen2", WINDOW, KIND.format("sliding_attention")),
        "phi 3": ("", "phi3", {"rope_parameters": LONGROPE}, KIND.format("longrope")),
        "falcon": ("", "falcon", {}, "the attention of falcon cannot be replaced, use 03-fsdp"),
        "bloom": ("", "bloom", {}, KIND.format("eager")),
        "doge": ("", "doge", {}, "its attention makes a mask of its own, use 03-fsdp"),
        "mamba": ("", "mamba", {}, KIND.format("eager, linear_attention")),
    },
    EXPERT: {
        "groups": ("--expert-size 3", "", {}, "--expert-size 3: does not divide 2 processes"),
        "experts": ("", "mixture", {"num_local_experts": 3}, "2: does not divide 3 experts"),
        "llama": ("", "llama", {}, NO_EXPERTS.format("llama")),
        "llama 4": ("", "llama4_text", LLAMA4, NO_EXPERTS.format("llama4_text")),
        "jetmoe": ("", "jetmoe", JETMOE, NO_EXPERTS.format("jetmoe")),
        "longcat": ("", "longcat_flash", LONGCAT, NO_EXPERTS.format("longcat_flash")),
    },
}
QUICK = [(stage, "groups") for stage in SPLIT] + [(TENSOR, "gpt2"), (PIPELINE, "gpt2")]
QUICK += [(CONTEXT, "mistral"), (EXPERT, "llama")]


@pytest.mark.law5
@pytest.mark.parametrize(
    ("stage", "flags", "architecture", "sizes", "message"), rows(REFUSED, quick=QUICK)
)
def test_what_cannot_be_split_ends_in_one_line(
    from_scratch, stage, flags, architecture, sizes, message
):
    model = from_scratch(architecture, **sizes) if architecture else ()
    result = run(stage, 2, *FEW, *BATCH.get(stage, ()), *model, *flags.split(), check=False)
    assert result.returncode != 0
    assert "step     1/" not in result.out
    if message:
        [line] = result.errors
        assert message in line


@pytest.mark.parametrize(("name", "wrong", "right"), [("batch_size", 2, 1), ("lr", 1.0, 0.002)])
def test_ranks_with_different_flags(tmp_path, name, wrong, right):
    """As with another command on another machine. The pipeline stages would wait for each other, or
    each would train with a learning rate of its own."""
    line = "    main(parse_args())\n"
    other = f"    args = parse_args()\n    if LOCAL_RANK == 0:\n        args.{name} = {wrong!r}\n"
    path = mutant(tmp_path, PIPELINE, (line, f"{other}    main(args)\n"))
    result = run(PIPELINE, 2, *FEW, "-b", 1, path=path, check=False)
    said = f"{name} is {wrong}, but {right} on rank 1: give all ranks the same flags and files"
    assert result.errors == [f"train-llm.py: error: {said}"]

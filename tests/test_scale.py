"""The formulas of the chapters' tables against what is measured, within 5 %."""

import re
import shutil

import bench_context
import bench_experts
import pytest
import scale
import torch
import transformers
from conftest import ROOT, load, metrics, run

pytestmark = pytest.mark.law6

SHAPES = [
    # hidden size, heads, heads of keys and values, width of the MLP
    (256, 4, 4, 512),
    (256, 4, 4, 1024),
    (512, 8, 8, 512),
    (512, 8, 2, 1536),
    (512, 8, 1, 2048),
]


def llama(shape, layers):
    hidden, heads, kv, width = shape
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv}
    sizes |= {"intermediate_size": width, "num_hidden_layers": layers, "vocab_size": 1024}
    return transformers.LlamaConfig(**sizes, max_position_embeddings=256)


def test_state_in_stage_03(tmp_path):
    """16 bytes a parameter, dealt out."""
    processes = 2
    config = llama(SHAPES[3], 3)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "model")
    flags = ("-s", 32, "--global-batch-size", 4, "--max-steps", 2, "--eval-sequences", 4)
    flags += ("-m", tmp_path / "model", "--from-scratch")
    run("03-fsdp", processes, "-e", "a", "--save-dir", tmp_path, *flags)
    measured = metrics(tmp_path / "a")[2]["memory/state_gb"] * 1e9
    n, _ = scale.parameters(config)
    assert measured == pytest.approx(scale.state_bytes(n, processes), rel=0.05)


def kept_bytes(config, batch, length):
    """Bytes that autograd keeps of a forward in bf16, parameters not counted."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model = model.bfloat16().train()
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that no other takes its place
        return tensor

    ids = torch.randint(0, config.vocab_size, (batch, length))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _output = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("shape", SHAPES[1::2])
def test_activations_of_a_block(shape):
    """Three blocks against one: what a block keeps for its backward, per token."""
    batch, length = 2, 128
    more, less = (kept_bytes(llama(shape, layers), batch, length) for layers in (3, 1))
    measured = (more - less) / 2 / (batch * length)
    assert measured == pytest.approx(scale.activation_bytes(llama(shape, 1)), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "key_value_heads"), [(2, 2), (4, 8)])
def test_activations_of_a_block_in_a_context_group(ranks, key_value_heads):
    """In bf16, within 2 %."""
    config = bench_context.llama(key_value_heads, 1)
    how = (key_value_heads, "bf16", False)
    measured = bench_context.on_a_group(ranks, bench_context.kept_of_a_block, *how)
    formula = bench_context.LENGTH * scale.context_bytes(config, ranks)
    assert measured == pytest.approx(formula, rel=0.02)


@pytest.mark.slow
def test_a_checkpointed_block_in_a_context_group_keeps_its_own_tokens_alone():
    """The input of the block, to the byte."""
    ranks = 2
    how = (2, "bf16", True)
    measured = bench_context.on_a_group(ranks, bench_context.kept_of_a_block, *how)
    assert measured == 2 * bench_context.LENGTH * bench_context.llama(2, 1).hidden_size / ranks


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_longest_sequence_is_the_longest_that_fits(checkpointing):
    name, ranks = "Llama-3-8B", 4
    length, parts = bench_context.longest(name, ranks, checkpointing)
    longer = scale.context_sizes(name, 8, length + 256, ranks, checkpointing)
    assert parts["total"] < 80e9 <= longer["total"]
    assert length % (2 * ranks) == 0


@pytest.mark.slow
@pytest.mark.parametrize("expert_size", [1, 2])
def test_state_in_stage_10(expert_size):
    """16 bytes a parameter, dealt out evenly, whatever the size of an expert group."""
    config = bench_experts.tiny()
    how = ("10-expert-parallel", config, expert_size)
    for whole, _ in bench_experts.on_a_group(2, bench_experts.state_of_ranks, *how):
        n, _ = scale.parameters(config)
        assert whole == pytest.approx(scale.state_bytes(n, 2), rel=0.001)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "expert_size", "dtype", "checkpointing"),
    [(2, 2, "bf16", True), (4, 2, "bf16", False), (2, 1, "fp32", False)],
)
def test_what_a_rank_sends_for_the_experts_of_a_block(ranks, expert_size, dtype, checkpointing):
    """To the byte, if all experts have equally many rows."""
    how = ("10-expert-parallel", expert_size, dtype, checkpointing, True)
    counted = bench_experts.on_a_group(ranks, bench_experts.sent_for_a_block, *how)
    config, size = bench_experts.tiny(), bench_experts.DTYPES[dtype].itemsize
    tokens = bench_experts.BATCH * 256
    formula = scale.expert_bytes(config, tokens, ranks, expert_size, size, checkpointing)
    assert counted[1:3] == pytest.approx(formula, rel=1e-12)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", scale.MIXTURES)
def test_stage_10_sends_less_than_03_below_a_number_of_tokens(name, size, checkpointing):
    config = scale.mixtures()[name]
    tokens = scale.break_even_tokens(config, size, checkpointing)
    for ranks, expert_size in ((8, 2), (8, 8), (64, 16)):
        in_03, _ = scale.expert_bytes(config, tokens, ranks, 1, size, checkpointing)
        in_10 = sum(scale.expert_bytes(config, tokens, ranks, expert_size, size, checkpointing))
        assert in_10 == pytest.approx(in_03)


@pytest.mark.parametrize("name", scale.MIXTURES)
def test_parameters_of_an_expert(name):
    """Those that the model has, of which a block is built."""
    config = scale.mixtures()[name]
    experts, _ = scale.experts_of(config)
    layers = getattr(config, "first_k_dense_replace", 0) + 1  # the first ones may have no experts
    config.num_hidden_layers = layers
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    [module] = [m for m in model.modules() if hasattr(m, "has_gate")]
    number = sum(parameter.numel() for parameter in module.parameters())
    assert number == experts * scale.values_of_experts(config)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Llama-3.2-1B", 1.2358), ("Llama-3-8B", 8.0303), ("Llama-3-70B", 70.5537)],
)
def test_the_models_have_their_known_sizes(name, billions):
    n, _ = scale.parameters(scale.config_of(name))
    assert n / 1e9 == pytest.approx(billions, abs=1e-4)


@pytest.mark.slow  # compiles
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_what_autograd_keeps_of_a_block(name, compiled):
    """In bf16, to the byte: the difference between two blocks and one. A GPU keeps the same."""
    if compiled and not shutil.which("g++"):
        pytest.skip("to compile on a CPU needs a compiler (Debian: apt-get install g++)")
    sizes = {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024}
    stage, ids, kept = load("01-single-gpu"), torch.zeros(2, 256, dtype=torch.int64), []
    for layers in (1, 2):
        config = transformers.AutoConfig.for_model(name, num_hidden_layers=layers, **sizes)
        model = stage.load_model(config, None, "sdpa", 0)
        block = model.model.layers[-1]
        for layer in model.model.layers if compiled else ():
            layer.forward = torch.compile(layer.forward, dynamic=False)
        saved = {}

        def keep(tensor, saved=saved):
            saved[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with torch.autocast("cpu", torch.bfloat16), hooks:
            stage.loss_sum(model, ids, ids, stage.sum_cross_entropy)
        own = {p.data_ptr() for p in model.parameters()}
        kept.append(sum(t.untyped_storage().nbytes() for p, t in saved.items() if p not in own))
        torch._dynamo.reset()
    copies = 2 * sum(p.numel() for p in block.parameters() if p.ndim > 1)
    per_token = (kept[1] - kept[0] - copies) / ids.numel()
    assert per_token == scale.kept_by_a_block(config, compiled)


def test_the_readmes_line_for_a_card_of_24_gb():
    """By the formulas of chapter 01 and the sizes of Qwen3-0.6B as the hub has them."""
    config = transformers.Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    n, _ = scale.parameters(config)
    assert round(n / 1e6) == 596
    parts = scale.one_device(config, 4 * 1024, checkpointing=True)  # the default micro-batch
    gigabytes = [round(part / 1e9, 1) for part in parts[:4]]
    [sentence] = re.findall(r"it needs .*?GB:.*?\.\s", (ROOT / "GUIDE.md").read_text(), re.S)
    numbers = [float(number) for number in re.findall(r"\b\d+\.\d\b", sentence)]
    assert numbers == [round(sum(gigabytes), 1), *gigabytes]
    assert sum(parts) < 0.75 * 24e9


def test_what_fits_by_the_table_of_the_readme():
    """Models of 1 and 8 billion parameters. The other rows are held by the test above, and by the
    table of chapter 05."""
    rows = (ROOT / "README.md").read_text()
    llama = scale.config_of("Llama-3.2-1B")
    total = sum(scale.one_device(llama, 4 * 1024, checkpointing=True))
    assert f"| Llama-3.2-1B | one GPU | 4 of 1024 tokens | {total / 1e9:.1f} |" in rows

    qwen = transformers.Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    )
    n, block = scale.parameters(qwen)
    layers, h, tokens = qwen.num_hidden_layers, qwen.hidden_size, 2 * 1024
    model = (scale.state_bytes(n, 8), n - layers * block, block)
    again = tokens * scale.activation_bytes(qwen)
    logits, last = tokens * scale.logit_bytes(qwen), 2 * qwen.vocab_size * h
    total = scale.peak_bytes(*model, tokens * layers * 2 * h, again, logits, last)
    assert f"| Qwen3-8B | eight GPUs of a machine | 2 of 1024 tokens | [{total / 1e9:.0f}]" in rows

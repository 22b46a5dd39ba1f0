"""The formulas of the chapters' tables against what is counted."""

import shutil

import bench_context
import bench_experts
import pytest
import scale
import torch
import transformers

import plan

pytestmark = pytest.mark.law6


@pytest.mark.slow
def test_activations_of_a_block_in_a_context_group():
    """Of a compiled block in bf16, to the byte."""
    ranks, key_value_heads = 2, 2
    if not shutil.which("g++"):
        pytest.skip("to compile on a CPU needs a compiler (Debian: apt-get install g++)")
    config = bench_context.llama(key_value_heads, 1)
    how = (key_value_heads, "bf16", False, True)
    measured = bench_context.on_a_group(ranks, bench_context.kept_of_a_block, *how)
    assert measured == bench_context.LENGTH * plan.bytes_of_a_block(config, context_size=ranks)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_longest_sequence_is_the_longest_that_fits(checkpointing):
    name, ranks = "Llama-3-8B", 4
    length, parts = bench_context.longest(name, ranks, checkpointing)
    model = scale.model_of(name, length)
    longer = bench_context.parts_of_a_peak(model, length + 256, ranks, checkpointing)
    assert sum(parts.values()) < 80e9 <= sum(longer.values())
    assert length % (2 * ranks) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "expert_size", "dtype", "checkpointing"),
    [(4, 2, "bf16", True), (2, 1, "fp32", False)],
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

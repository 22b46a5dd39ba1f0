"""What needs a CUDA device. On a machine without one these tests are skipped.

What needs several ranks, and so NCCL, is in benchmarks/ranks.py."""

import pytest
import torch
from conftest import (
    SMALL,
    assert_same_curve,
    metrics,
    mutant,
    run,
    save_tokenizer,
    script,
)
from transformers import LlamaConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
FEW = (*SMALL, "--max-steps", "20", "--log-freq", "1")
STAGES = [("01-single-gpu", 1), ("02-ddp", 1), ("03-fsdp", 1), ("04-compression", 1)]
STAGES += [("05-multinode", 1), ("07-tensor-parallel", 1), ("08-pipeline-parallel", 1)]
STAGES += [("09-context-parallel", 1), ("10-expert-parallel", 1)]


@pytest.fixture
def model(stage, mixture_without_choice):
    """Flags of the model that a stage is compared with."""
    return mixture_without_choice if stage == "10-expert-parallel" else ()


@pytest.mark.law1
@pytest.mark.parametrize(("stage", "processes"), STAGES[1:])
def test_the_stages_agree_on_a_gpu(stage, processes, curve, model):
    flags = (*FEW, "--dtype", "fp32", *model)
    assert_same_curve(
        curve("01-single-gpu", 1, *flags), curve(stage, processes, *flags), range(1, 21)
    )


@pytest.mark.law1
def test_a_gpu_gives_the_curve_of_a_cpu(curve):
    flags = (*FEW, "--dtype", "fp32")
    cpu = curve("01-single-gpu", 1, *flags, "--device", "cpu")
    assert_same_curve(cpu, curve("01-single-gpu", 1, *flags), range(1, 21), 1e-4, 1e-2)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("stage", "processes"), STAGES)
def test_mixed_precision(stage, processes, dtype, curve):
    if (stage, dtype) == ("08-pipeline-parallel", "fp16"):
        pytest.skip("stage 08 has no fp16")
    fp32 = curve(stage, processes, *FEW, "--dtype", "fp32")
    mixed = curve(stage, processes, *FEW, "--dtype", dtype)
    assert mixed[20]["train/loss"] < mixed[1]["train/loss"]
    assert_same_curve(fp32, mixed, range(1, 5), rel_loss=1e-2, rel_norm=1e-1)


@pytest.mark.law1
@pytest.mark.parametrize("flag", ["--no-compile", "--activation-checkpointing", "--attn=eager"])
@pytest.mark.parametrize(("stage", "processes"), STAGES)
def test_switches_leave_the_curve(stage, processes, flag, curve):
    if (stage, flag) == ("09-context-parallel", "--attn=eager"):
        pytest.skip("stage 09 cannot split attention of kind eager")
    plain = curve(stage, processes, *FEW, "--dtype", "fp32")
    switched = curve(stage, processes, *FEW, "--dtype", "fp32", flag)
    assert_same_curve(plain, switched, range(1, 5), rel_loss=1e-3, rel_norm=1e-2)


def test_a_compiled_loss_saves_memory(tmp_path, curve):
    """The logits of 65,536 tokens outweigh all else: 4 bytes each in the place of 10."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=65536, num_attention_heads=2, **sizes)
    config.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    flags = ("-m", tmp_path, "--from-scratch", "-s", "256", "-b", "16", "--global-batch-size", "16")
    flags = ("01-single-gpu", 1, *flags, "--max-steps", "3", "--log-freq", "1")
    name = "memory/peak_gb"
    compiled = curve(*flags, "--eval-sequences", "1")[2][name]
    assert compiled < 0.7 * curve(*flags, "--eval-sequences", "1", "--no-compile")[2][name]


def test_a_peak_is_that_of_the_steps_since_the_last_line(curve):
    """Not that of the first step, in which AdamW's moments are made, or of loading."""
    flags = ("-s", "256", "-b", "2", "--global-batch-size", "2", "--no-compile", "--log-freq", "1")
    peaks = curve("01-single-gpu", 1, *flags, "--max-steps", "4")
    name = "memory/peak_gb"
    assert peaks[4][name] <= peaks[1][name]
    assert peaks[4][name] == pytest.approx(peaks[3][name], rel=0.01)


def test_activation_checkpointing_saves_memory(curve):
    flags = ("-s", "256", "-b", "16", "--max-steps", "3", "--log-freq", "1")
    plain = curve("01-single-gpu", 1, *flags)[3]["memory/peak_gb"]
    assert (
        curve("01-single-gpu", 1, *flags, "--activation-checkpointing")[3]["memory/peak_gb"]
        < 0.9 * plain
    )


@pytest.mark.parametrize("stage", ["03-fsdp", "10-expert-parallel"])
def test_cpu_offload_keeps_the_curve_and_frees_the_device(stage, curve, model):
    flags = (stage, 1, *FEW, "--dtype", "fp32", *model)
    plain, offloaded = curve(*flags), curve(*flags, "--cpu-offload")
    assert_same_curve(plain, offloaded, range(1, 21), rel_loss=1e-4, rel_norm=1e-2)
    name = "memory/peak_gb"
    assert offloaded[20][name] < plain[20][name] - 0.5 * plain[20]["memory/state_gb"]


def test_cpu_offload_of_weights_that_are_read(tmp_path, curve):
    named = ("-e", "a", "--save-dir", tmp_path)
    run("01-single-gpu", 1, *FEW, *named)
    flags = ("03-fsdp", 1, *FEW, "--dtype", "fp32", "-m", tmp_path / "a" / "final_model")
    plain, offloaded = curve(*flags), curve(*flags, "--cpu-offload")
    assert_same_curve(plain, offloaded, range(1, 21), rel_loss=1e-4, rel_norm=1e-2)


def test_the_device_is_waited_for_at_log_steps_only(tmp_path):
    """torch warns of each synchronisation; between two log steps there is none."""
    edits = [
        (
            '        log.lap("update")\n',
            '        log.lap("update")\n        torch.cuda.set_sync_debug_mode(0)\n',
        ),
        (
            "        step_loss = torch.zeros((), device=device)\n",
            "        step_loss = torch.zeros((), device=device)\n"
            "        torch.cuda.set_sync_debug_mode('error')\n",
        ),
    ]
    path = mutant(tmp_path, "01-single-gpu", *edits)
    run("01-single-gpu", 1, *SMALL, "--max-steps", "5", "--log-freq", "5", path=path)


def test_blocks_are_compiled_unless_one_says_no(tmp_path):
    count = "torch._dynamo.utils.counters['stats']['unique_graphs']"
    edit = ("    log.close()\n", f"    log.close()\n    print('graphs', {count})\n")
    # A block and the loss, both once more without gradients, and the block for the sample.
    for flags, graphs in (((), 5), (("--no-compile",), 0)):
        path = mutant(tmp_path / str(graphs), "01-single-gpu", edit)
        out = run("01-single-gpu", 1, *FEW, *flags, path=path).out
        assert f"graphs {graphs}\n" in out


@pytest.mark.law3
def test_a_checkpoint_moves_between_gpu_and_cpu(tmp_path):
    named = ("-e", "a", "--save-dir", tmp_path, *SMALL, "--dtype", "fp32", "--log-freq", "1")
    run("01-single-gpu", 1, *named, "--max-steps", "4")
    out = run("03-fsdp", 1, *named, "--max-steps", "6", "--device", "cpu").out
    assert "resumed from" in out
    run("02-ddp", 1, *named, "--max-steps", "8")
    assert list(metrics(tmp_path / "a")) == list(range(1, 9))
    assert script("01-single-gpu").exists()

"""What the benchmarks compute from the log of a run, and the changes that they make to a stage."""

import json

import bench_compression
import pytest
import torch
import torch.distributed as dist
from conftest import load

pytestmark = pytest.mark.law6

LINE = {
    "step": 4,
    "comm/bytes_per_step": 1_000_000,
    "comm/compression_ratio": 4.0,
    "comm/encode_ms": 10.0,
    "time/forward_ms": 80.0,
}


def test_break_even_by_hand():
    """3 MB less in 10 ms: 300 MB/s, which is 2400 Mbit/s."""
    assert bench_compression.break_even_mbit(LINE, 0.0) == pytest.approx(2400)
    # 4 MB in 50 ms, of which the backward hides 40.
    assert bench_compression.break_even_mbit(LINE, 40.0) == pytest.approx(640)
    longer = LINE | {"comm/compression_ratio": 0.9}
    assert bench_compression.break_even_mbit(longer, 0.0) == 0


@pytest.mark.parametrize(
    ("on_gpu", "more", "mbit"),
    [
        (False, [], "2,400"),
        # 16 sequences on each of 2 processes, 2 micro-batches: a backward of 2 * 80 / 2 ms.
        (True, [], "356"),
        (True, ["--device=cpu"], "2,400"),
    ],
)
def test_break_even_of_a_run(tmp_path, monkeypatch, capsys, on_gpu, more, mbit):
    monkeypatch.setattr(bench_compression, "GPU", on_gpu)
    flags = ["--global-batch-size=32", "--batch-size=8", "--compression=int8", "--compile", *more]
    (tmp_path / "flags.txt").write_text("\n".join(flags) + "\n")
    first = LINE | {"step": 1, "comm/encode_ms": 1000.0}
    lines = [first, LINE, {"step": 5, "eval/loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    bench_compression.break_even(tmp_path, "2")
    said = f"int8 beats none on links of less than {mbit} Mbit/s per rank\n"
    assert capsys.readouterr().out == said


def test_break_even_of_a_run_that_compressed_nothing(tmp_path):
    (tmp_path / "flags.txt").write_text("--compression=none\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps(LINE | {"comm/encode_ms": 0.0}) + "\n")
    with pytest.raises(SystemExit, match="nothing was compressed"):
        bench_compression.break_even(tmp_path, "2")


@pytest.fixture
def compressor():
    """Makes the GradientCompressor of stage 04 with patches, for a replica that is alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def patched(patches, mode, wire_dtype):
        module = load("04-compression")
        for patch in patches.split(","):
            name, _, value = patch.partition("=")
            bench_compression.PATCHES[name](module, value)
        lap = lambda phase: None  # noqa: E731
        settings = (mode, 0.5, 64, wire_dtype, False, False, lap)
        made = module.GradientCompressor(dist.group.WORLD, *settings)
        return module, made

    yield patched
    dist.destroy_process_group()


def gradients(count):
    """Of 4 chunks, the last one not full, and without zeros."""
    draw = torch.Generator().manual_seed(0)
    return [torch.rand(250, generator=draw) + 0.1 for _ in range(count)]


@pytest.mark.parametrize("patch", ["largest", "low", "common", "drawn"])
def test_half_of_each_chunk_is_sent(compressor, patch):
    _, average = compressor(patch, "randk", "fp32")
    [gradient] = gradients(1)
    average.start_step(1, gradient.device)
    sent = gradient.clone()
    average("a", sent)
    kept = sent != 0
    assert torch.equal(sent[kept], gradient[kept])
    rows = gradient[:192].view(3, 64)
    chosen = kept[:192].view(3, 64)
    assert (chosen.sum(1) == 32).all()
    if patch == "largest":
        assert (rows[chosen].view(3, 32).amin(1) > rows[~chosen].view(3, 32).amax(1)).all()
    if patch == "low":
        assert chosen[:, :32].all()
    if patch == "common":
        assert (chosen == chosen[0]).all()
    if patch == "drawn":
        assert not (chosen == chosen[0]).all()


@pytest.mark.parametrize("patches", ["feedback=0.5", "largest,feedback=0.5"])
@pytest.mark.parametrize("mode", ["randk", "int8"])
def test_feedback_adds_what_was_not_sent(compressor, patches, mode):
    """A module's gradient gets half of what its last one kept, and none of another module's."""
    module, average = compressor(patches, mode, "fp32")
    first, other, second = gradients(3)
    average.start_step(1, first.device)
    sent = first.clone()
    average("a", sent)
    average("b", other.clone())

    average.start_step(2, first.device)
    result = second.clone()
    average("a", result)
    expected = second + 0.5 * (first - sent)
    assert not torch.equal(expected, second)
    if mode == "int8":
        padded = torch.nn.functional.pad(expected, (0, 6))
        expected = module.decode(module.encode(padded, "int8"), "int8")[:250]
    else:
        expected = expected * (result != 0)
    assert torch.allclose(result, expected, rtol=1e-6)


def test_a_warm_up_is_dense(compressor):
    _, average = compressor("largest,feedback=1,warmup=2", "randk", "int8")
    for step, gradient in enumerate(gradients(4), start=1):
        average.start_step(step, gradient.device)
        sent = gradient.clone()
        average("a", sent)
        assert torch.equal(sent, gradient) == (step <= 2)

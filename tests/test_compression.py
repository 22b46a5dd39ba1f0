"""Stage 04: what its hook computes, what it sends, and that replicas stay equal to the last bit."""

import json
from functools import cache

import pytest
import torch
from compression_worker import MODES
from conftest import (
    SMALL,
    SUPPORT,
    TEST_MODULES,
    assert_same_curve,
    finish,
    fork,
    load,
    metrics,
    mutant,
    run,
    same_bits,
)
from hypothesis import given, settings
from hypothesis import strategies as st

STAGE = "04-compression"
CPU = torch.device("cpu")
ALL = ("--compression", "dct", "--dct-keep", "1", "--wire-dtype")


@pytest.fixture(scope="module")
def stage():
    return load(STAGE)


@pytest.fixture(scope="module")
def averages():
    """By number of replicas: results of the hook for many inputs, from processes that ran it."""

    @cache
    def averages_of(replicas):
        worker = SUPPORT / "compression_worker.py"
        result = finish(fork(worker, replicas, PYTHONPATH=TEST_MODULES))
        assert result.returncode == 0, result.err
        return json.loads(result.out.split("RESULTS")[1].splitlines()[0])

    return averages_of


REPLICAS = [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]


@settings(deadline=None, max_examples=40)
@given(chunk=st.integers(2, 600))
def test_the_basis_is_the_orthonormal_dct(stage, chunk):
    """Against the DCT by way of an FFT. Source: Makhoul, IEEE Transactions on ASSP, 1980."""
    basis = stage.dct_basis(chunk, CPU)
    assert torch.allclose(basis @ basis.T, torch.eye(chunk), atol=1e-5)
    values = torch.randn(7, chunk, generator=torch.Generator().manual_seed(chunk)).double()
    mirrored = torch.fft.fft(torch.cat([values, values.flip(1)], dim=1))[:, :chunk]
    turn = torch.exp(-0.5j * torch.pi / chunk * torch.arange(chunk))
    known = (mirrored * turn).real / (2 * chunk) ** 0.5
    known[:, 0] /= 2**0.5
    assert torch.allclose(values.float() @ basis.T, known.float(), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [2, 3, 64, 100, 128, 256, 512, 600])
def test_the_basis_is_that_of_scipy(stage, chunk):
    """Slow, because transformers imports scipy wherever it is installed: 0.4 s in each process."""
    fft = pytest.importorskip("scipy.fft", reason="needs scipy: pip install -e '.[scipy]'")
    values = torch.randn(7, chunk, generator=torch.Generator().manual_seed(chunk)).double()
    known = torch.from_numpy(fft.dct(values.numpy(), type=2, norm="ortho")).float()
    assert torch.allclose(values.float() @ stage.dct_basis(chunk, CPU).T, known, atol=1e-5)


@settings(deadline=None, max_examples=60)
@given(
    wire=st.sampled_from(["fp32", "bf16", "int8", "int4"]),
    blocks=st.integers(1, 5),
    scale=st.floats(1e-30, 1e30),
    seed=st.integers(0, 9),
)
def test_a_value_comes_back_within_half_a_level(stage, wire, blocks, scale, seed):
    """And as many bytes travel as the formula says: a scale of 4 bytes behind 256 integers."""
    draw = torch.Generator().manual_seed(seed)
    values = scale * torch.randn(256 * blocks, generator=draw) ** 3
    rows = stage.encode(values, wire)
    assert rows.nbytes == blocks * {"fp32": 1024, "bf16": 512, "int8": 260, "int4": 132}[wire]
    error = (stage.decode(rows, wire) - values).abs().view(blocks, 256)
    largest = values.abs().view(blocks, 256).amax(1, keepdim=True)
    if wire == "fp32":
        assert not error.any()
    elif wire == "bf16":
        assert (error <= values.abs().view(blocks, 256) / 256 + 1e-38).all()
    else:
        levels = 127 if wire == "int8" else 7
        assert (error <= largest / levels * 0.5001 + 1e-37).all()


@pytest.mark.law1
@pytest.mark.parametrize("replicas", REPLICAS)
def test_all_replicas_get_the_same_bits(averages, replicas):
    assert len(averages(replicas)) == len(MODES) * 9
    assert all(case["identical"] for case in averages(replicas))


@pytest.mark.parametrize("replicas", REPLICAS)
def test_the_mean_is_the_mean(averages, replicas):
    """Exactly where nothing is lost, near it where values are rounded, never the sum."""
    bounds = {("none", "fp32", 1): 1e-6, ("dct", "fp32", 1): 1e-6, ("bf16", "fp32", 1): 4e-3}
    bounds |= {("int8", "fp32", 1): 0.015, ("int4", "fp32", 1): 0.25, ("dct", "int4", 1): 0.25}
    bounds |= {("randk", "fp32", 1): 1e-6}
    # Half of the energy is missing: an error of the root of a half. Of few values more, or less.
    bounds |= {("dct", wire, 0.5): 0.73 for wire in ("fp32", "bf16", "int8", "int4")}
    bounds |= {("randk", wire, 0.5): 0.73 for wire in ("fp32", "int4")}
    for case in averages(replicas):
        if case["input"] == "zero":
            assert case["zero"]
        elif case["input"] == "random" and (case["keep"] == 1 or case["n"] > 2000):
            bound = bounds.get((case["mode"], case["wire"], case["keep"]), 1)
            assert case["error"] < bound, case


@pytest.mark.parametrize("replicas", REPLICAS)
def test_what_is_not_finite_is_not_hidden(averages, replicas):
    """Where it does not travel, too: a gradient scaler must see it."""
    cases = [case for case in averages(replicas) if case["input"] in ("nan", "inf")]
    assert len(cases) == 2 * len(MODES)
    assert not any(case["finite"] for case in cases)
    assert all(case["finite"] for case in averages(replicas) if case not in cases)


def bytes_sent(case, replicas):
    """What leaves a rank on average, from the formulas of the collectives."""
    share = (replicas - 1) / replicas
    if case["mode"] == "none":
        return 2 * share * 4 * case["n"]
    chunks, sparse = -(-case["n"] // 256), case["mode"] in ("randk", "dct")
    values = chunks * max(1, round(256 * case["keep"])) if sparse else case["n"]
    wire = case["wire"] if sparse else case["mode"]
    rows = -(-values // (256 * replicas)) * replicas
    row = {"fp32": 1024, "bf16": 512, "int8": 256 + 4, "int4": 128 + 4}[wire]
    return share * 2 * rows * row


@pytest.mark.law6
@pytest.mark.parametrize("replicas", REPLICAS)
def test_what_is_counted_is_what_is_sent(averages, replicas):
    for case in averages(replicas):
        assert case["sent"] == pytest.approx(bytes_sent(case, replicas)), case
        assert case["dense"] == pytest.approx(2 * (replicas - 1) / replicas * 4 * case["n"])
        computing = [lap for lap in case["laps"] if lap != "communicate"]
        assert computing[0] == "backward" and set(computing[1:]) <= {"encode"}


@pytest.mark.parametrize("replicas", REPLICAS)
def test_what_travels_is_exact_and_the_rest_is_zero(averages, replicas):
    cases = [case for case in averages(replicas) if case["exact"] is not None]
    assert len(cases) == 9
    assert all(case["exact"] for case in cases if case["finite"]), cases


def checked(folder):
    """Stage 04, which ends in an error when parameters or gradients differ between replicas."""
    lines = """        scaler.update()
        for tensor in [t for p in model.parameters() for t in (p, p.grad)]:
            bits = tensor.to_local().view(torch.int32)
            least, most = bits.clone(), bits.clone()
            dist.all_reduce(least, dist.ReduceOp.MIN, group=replicate_group)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=replicate_group)
            assert torch.equal(least, most), f"replicas differ at step {step}"
"""
    done = ("    log.close()\n", '    log.close()\n    say(f"equal after step {step}")\n')
    return mutant(folder, STAGE, ("        scaler.update()\n", lines), done)


TWELVE = ("--max-steps", "12", "--lr", "2e-3", *SMALL, "-b", "2")
WAYS = {"none": ("--compression", "none"), "bf16": ("--compression", "bf16")}
WAYS |= {"int8": ("--compression", "int8"), "int4": ("--compression", "int4")}
WAYS |= {"randk": ("--compression", "randk", "--wire-dtype", "int4")}
WAYS |= {"dct": ("--compression", "dct"), "dct-fp32": (*ALL, "fp32")}
MESHES = [(3, 1), (4, 2), (6, 2)]


@pytest.mark.law1
@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "processes", "shard_size"),
    # What the ways have in common is their sum: on all meshes for one of them.
    [(way, *mesh) for way in WAYS for mesh in (MESHES if way == "dct" else [(4, 2)])],
)
def test_replicas_stay_equal_to_the_last_bit(tmp_path, way, processes, shard_size):
    """Parameters and gradients, over 12 steps of AdamW with clipping."""
    flags = (*TWELVE, *WAYS[way], "--shard-size", shard_size)
    assert "equal after step 12" in run(STAGE, processes, *flags, path=checked(tmp_path)).out


@pytest.mark.law1
def test_replicas_that_differ_are_noticed(tmp_path):
    """The check above bites: a replica that keeps its own gradient fails it."""
    path = checked(tmp_path)
    text = path.read_text()
    line = "        gradient.copy_(mean)\n"
    assert text.count(line) == 1
    path.write_text(text.replace(line, ""))
    result = run(STAGE, 2, *TWELVE, "--shard-size", 1, path=path, check=False)
    assert result.returncode != 0
    assert "replicas differ at step 1" in result.err


NATIVE = (
    ('shard_mesh, replicate_group = mesh["shard"], ', "shard_mesh, replicate_group = mesh, "),
    ("module.set_all_reduce_hook(partial(compressor, module))", "pass"),
    ("            optimizer.zero_grad()\n\n", "\n"),  # gradients add up in `.grad`
)


@pytest.mark.law1
@pytest.mark.slow
@pytest.mark.parametrize(("processes", "shard_size"), [(2, 1), (4, 2)])
def test_none_equals_pytorchs_own_hybrid_sharding(tmp_path, processes, shard_size):
    """The control is what fully_shard does by itself on a mesh of two dimensions."""
    flags = ("--max-steps", "20", *SMALL, "--shard-size", shard_size, "--log-freq", 1)
    flags = (*flags, "--compression", "none", "--save-dir", tmp_path)
    run(STAGE, processes, *flags, "-e", "ours")
    run(STAGE, processes, *flags, "-e", "native", path=mutant(tmp_path, STAGE, *NATIVE))
    ours, native = metrics(tmp_path / "ours"), metrics(tmp_path / "native")
    assert_same_curve(ours, native, range(1, 21), rel_loss=1e-6, rel_norm=1e-6)


@pytest.mark.law1
@pytest.mark.slow
def test_a_full_spectrum_in_fp32_equals_none(curve):
    """But for the rounding of the transform and its inverse, which gradient norms enlarge: by up to
    2e-4 on the text of Python 3.13."""
    flags = ("--max-steps", "20", *SMALL, "--shard-size", 1)
    none = curve(STAGE, 2, *flags, "--compression", "none")
    assert_same_curve(none, curve(STAGE, 2, *flags, *ALL, "fp32"), range(1, 21), rel_norm=1e-3)


@pytest.mark.law4
@pytest.mark.slow
def test_a_compressed_run_resumes_to_the_last_bit(tmp_path, curve):
    """The hook keeps nothing from step to step, so a checkpoint holds nothing of it."""
    flags = (*SMALL, "--lr-scheduler", "constant", "--shard-size", 1, "--compression", "dct")
    whole = curve(STAGE, 2, *flags, "--max-steps", 8)
    named = ("-e", "a", "--save-dir", tmp_path, "--log-freq", 1)
    run(STAGE, 2, *flags, *named, "--max-steps", 5)
    run(STAGE, 2, *named, "--max-steps", 8)  # the flags stand in the checkpoint
    assert same_bits(whole, metrics(tmp_path / "a"), range(1, 9))


def test_what_a_run_says_of_its_traffic(tmp_path):
    """Logged bytes are those of the formula."""
    named = ("-e", "a", "--save-dir", tmp_path, "--log-freq", 1)
    flags = ("--max-steps", "4", *SMALL, "--shard-size", 1)
    out = run(STAGE, 2, *flags, "--compression", "int8", *named).out
    lines = metrics(tmp_path / "a")
    dense = 664_448 * 4  # half of it twice
    sent = lines[4]["comm/bytes_per_step"]
    assert dense / 3.95 < sent < dense / 3.9
    assert lines[4]["comm/compression_ratio"] == pytest.approx(dense / sent)
    assert lines[4]["comm/encode_ms"] > 0
    assert "2 replica(s) of 1 shard(s), compression int8\n" in out


def test_flags_reach_the_hook_and_indices_change(tmp_path):
    """A quarter of each 64 values as int4: bytes from the sizes of the modules, by hand."""
    edits = [("class GradientCompressor:", "seen = []\n\n\nclass GradientCompressor:")]
    before = '        self.lap("backward")'
    edits += [(before, f"        seen.append(sorted(self.indices.tolist()))\n{before}")]
    write = f'    Path(f"{tmp_path}/seen-{{dist.get_rank()}}").write_text(str(seen))\n'
    edits += [("    log.close()\n", "    log.close()\n" + write)]
    named = ("-e", "a", "--save-dir", tmp_path, "--log-freq", 1)
    flags = ("--max-steps", "40", *SMALL, "--shard-size", 1, "--compression", "randk")
    flags = (*flags, "--keep-ratio", "0.25", "--chunk", "64", "--wire-dtype", "int4")
    run(STAGE, 2, *flags, *named, path=mutant(tmp_path, STAGE, *edits))
    seen = [json.loads((tmp_path / f"seen-{rank}").read_text()) for rank in (0, 1)]
    modules = 4  # three blocks and the root, which holds the two tables
    assert seen[0] == seen[1] and len(seen[0]) == 40 * modules
    assert all(len(set(indices)) == 16 for indices in seen[0])
    assert {index for indices in seen[0] for index in indices} == set(range(64))
    sent = 0
    for values in (3 * [188_672]) + [98_432]:
        rows = -(-(values // 64 * 16) // 512) * 2
        sent += 2 * rows * (128 + 4) / 2  # there and back, half of it to oneself
    assert metrics(tmp_path / "a")[3]["comm/bytes_per_step"] == sent


@pytest.mark.slow
def test_one_replica_has_nothing_to_compress(tmp_path):
    named = ("-e", "a", "--save-dir", tmp_path, "--log-freq", 1)
    out = run(STAGE, 2, "--max-steps", "2", *SMALL, *named).out
    assert "1 replica(s) of 2 shard(s), compression none\n" in out
    assert "nothing to compress: --shard-size 1 makes each process a replica\n" in out
    assert metrics(tmp_path / "a")[2]["comm/bytes_per_step"] == 0
    assert metrics(tmp_path / "a")[2]["comm/compression_ratio"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "more"),
    [(2, ("--compile",)), (4, ("--dtype", "bf16", "--activation-checkpointing"))],
)
def test_it_works_with_what_the_other_stages_have(tmp_path, processes, more):
    flags = ("--max-steps", "6", *SMALL, "--max-grad-norm", "0.1", *more)
    flags = (*flags, "--shard-size", processes // 2, "--compression", "randk")
    named = ("-e", "a", "--save-dir", tmp_path, "--log-freq", 1)
    result = run(STAGE, processes, *flags, *named, path=checked(tmp_path))
    assert "equal after step 6" in result.out
    assert metrics(tmp_path / "a")[6]["train/loss"] < metrics(tmp_path / "a")[1]["train/loss"]


@pytest.mark.law3
@pytest.mark.slow
def test_a_compressed_run_goes_on_with_other_replicas(tmp_path):
    """Nothing of the hook is in the checkpoint, so any mesh takes it up, and any mode."""
    named = ("-e", "a", "--save-dir", tmp_path, "--log-freq", 1)
    flags = (*SMALL, "--lr-scheduler", "constant", *named)
    run(STAGE, 4, *flags, "--shard-size", 1, "--compression", "randk", "--max-steps", 20)
    out = run(STAGE, 4, *flags, "--shard-size", 2, "--compression", "int8", "--max-steps", 25).out
    assert "resumed from" in out
    lines = metrics(tmp_path / "a")
    assert list(lines) == list(range(1, 26))
    assert lines[21]["train/loss"] == pytest.approx(lines[20]["train/loss"], rel=0.1)

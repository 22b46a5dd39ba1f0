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
    TINY,
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

import plan

STAGE = "04-compression"
TWELVE = ("--max-steps", "12", "--lr", "2e-3", *SMALL, "-b", "2", "--log-freq", "1")


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


REPLICAS = [pytest.param(2, marks=pytest.mark.slow), 3]


def test_the_basis_is_half_of_the_orthonormal_dct(stage):
    """Against the DCT by way of an FFT. Source: Makhoul, IEEE Transactions on ASSP, 1980."""
    basis = stage.low_frequencies()
    assert basis.shape == (128, 256)
    assert torch.allclose(basis @ basis.T, torch.eye(128), atol=1e-5)
    values = torch.randn(7, 256, generator=torch.Generator().manual_seed(0)).double()
    mirrored = torch.fft.fft(torch.cat([values, values.flip(1)], dim=1))[:, :256]
    turn = torch.exp(-0.5j * torch.pi / 256 * torch.arange(256))
    known = (mirrored * turn).real / 512**0.5
    known[:, 0] /= 2**0.5
    assert torch.allclose(values.float() @ basis.T, known[:, :128].float(), atol=1e-5)


@settings(deadline=None, max_examples=60)
@given(rows=st.integers(1, 5), scale=st.floats(1e-30, 1e30), seed=st.integers(0, 99))
def test_int8_is_off_by_half_a_level_at_most(stage, rows, scale, seed):
    draw = torch.Generator().manual_seed(seed)
    values = scale * torch.randn(rows, 256, generator=draw) ** 3
    integers, scales = stage.to_int8(values)
    assert integers.dtype == torch.int8 and scales.shape == (rows, 1)
    error = (integers * scales - values).abs()
    assert (error <= values.abs().amax(1, keepdim=True) / 127 * 0.5001 + 1e-37).all()


@pytest.mark.law1
@pytest.mark.parametrize("replicas", REPLICAS)
def test_all_replicas_get_the_same_bits(averages, replicas):
    assert len(averages(replicas)) == len(MODES) * 9
    assert all(case["identical"] for case in averages(replicas))


@pytest.mark.parametrize("replicas", REPLICAS)
def test_the_mean_is_the_mean(averages, replicas):
    """Of the sum of three micro-batches. Half of the energy is missing in the lower half of the
    spectrum of noise: an error of the root of a half."""
    bounds = {"none": 1e-6, "dct": 0.73, "int8": 0.015}
    for case in averages(replicas):
        if case["input"] == "zero":
            assert case["zero"]
        elif case["input"] == "random" and (case["mode"] == "none" or case["n"] > 2000):
            assert case["error"] < bounds[case["mode"]], case


@pytest.mark.parametrize("replicas", REPLICAS)
def test_what_is_not_finite_is_not_hidden(averages, replicas):
    """A gradient scaler, and the check for NaN, must see it."""
    cases = [case for case in averages(replicas) if case["input"] in ("nan", "inf")]
    assert len(cases) == 2 * len(MODES)
    assert not any(case["finite"] for case in cases)
    assert all(case["finite"] for case in averages(replicas) if case not in cases)


@pytest.mark.law6
@pytest.mark.parametrize("replicas", REPLICAS)
def test_what_is_counted_is_what_is_sent(averages, replicas):
    """What leaves a rank, from the formula of the collectives: exactly a half with dct."""
    for case in averages(replicas):
        rows = -(-case["n"] // 256)
        rows_of_all = -(-case["n"] // (256 * replicas)) * replicas
        num_bytes = {"none": 4 * case["n"], "dct": 512 * rows, "int8": (256 + 4) * rows_of_all}
        assert case["sent"] == pytest.approx(
            2 * (replicas - 1) / replicas * num_bytes[case["mode"]]
        )


def checked(folder, *edits):
    """Stage 04, which ends in an error when parameters or gradients differ between replicas."""
    lines = """        scaler.update()
        for tensor in [t for p in model.parameters() for t in (p, p.grad)]:
            bits = tensor.to_local().view(torch.int32)
            least, most = bits.clone(), bits.clone()
            dist.all_reduce(least, dist.ReduceOp.MIN, group=mesh.get_group("replicate"))
            dist.all_reduce(most, dist.ReduceOp.MAX, group=mesh.get_group("replicate"))
            assert torch.equal(least, most), f"replicas differ at step {step}"
"""
    return mutant(folder, STAGE, ("        scaler.update()\n", lines), *edits)


@pytest.mark.law1
@pytest.mark.parametrize(
    ("mode", "processes", "shard_size"),
    [
        ("int8", 2, 1),
        pytest.param("int8", 6, 2, marks=pytest.mark.slow),
        pytest.param("dct", 4, 2, marks=pytest.mark.slow),
        pytest.param("none", 4, 2, marks=pytest.mark.slow),
    ],
)
def test_replicas_stay_equal_to_the_last_bit(tmp_path, mode, processes, shard_size):
    """Parameters and gradients, over 12 steps of AdamW with clipping. Logged are the bytes of the
    formula, and what the replicas are is said."""
    flags = (*TWELVE, "--compression", mode, "--shard-size", shard_size)
    out = run(
        STAGE, processes, *flags, "-e", "a", "--save-dir", tmp_path, path=checked(tmp_path / "m")
    ).out
    replicas = processes // shard_size
    assert f"{replicas} replica(s) of {shard_size} shard(s), compression {mode}\n" in out
    lines = metrics(tmp_path / "a")
    assert lines[12]["train/loss"] < lines[1]["train/loss"]
    num_parameters = plan.sizes_of(load(STAGE).load_config(TINY), 256).num_parameters
    dense = 2 * (replicas - 1) / replicas * num_parameters / shard_size * 4
    ratio = lines[12]["comm/bytes_per_step"] / dense
    assert ratio == pytest.approx({"none": 1, "dct": 0.5, "int8": 260 / 1024}[mode], rel=0.01)


@pytest.mark.law1
def test_replicas_that_differ_are_noticed(tmp_path):
    """The check above bites: a replica that keeps its own gradient fails it."""
    line = "        gradient.copy_((integers * scales).flatten()[: len(gradient)])\n"
    path = checked(tmp_path, (line, ""))
    result = run(STAGE, 2, *TWELVE, "--compression", "int8", path=path, check=False)
    assert result.returncode != 0
    assert "replicas differ at step 1" in result.err


NATIVE = (
    ('mesh=mesh["shard"], mp_policy', "mesh=mesh, mp_policy"),
    ("module.set_all_reduce_hook(partial(replica_average, module))", "pass"),
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


@pytest.mark.law3
@pytest.mark.law4
@pytest.mark.slow
def test_a_compressed_run_resumes_to_the_last_bit(tmp_path, curve):
    """The hook keeps nothing from step to step, so a checkpoint holds nothing of it. Another mesh
    takes it up, too."""
    flags = (*SMALL, "--lr-scheduler", "constant", "--compression", "dct")
    whole = curve(STAGE, 2, *flags, "--max-steps", 8)
    named = (*flags, "-e", "a", "--save-dir", tmp_path, "--log-freq", 1)
    run(STAGE, 2, *named, "--max-steps", 5)
    run(STAGE, 2, *named, "--max-steps", 8)
    assert same_bits(whole, metrics(tmp_path / "a"), range(1, 9))
    out = run(STAGE, 4, *named, "--shard-size", 2, "--max-steps", 10).out
    assert "resumed from" in out
    lines = metrics(tmp_path / "a")
    assert lines[9]["train/loss"] == pytest.approx(lines[8]["train/loss"], rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "more"),
    [(2, ("--compile",)), (4, ("--dtype", "bf16", "--activation-checkpointing"))],
)
def test_it_works_with_what_the_other_stages_have(tmp_path, processes, more):
    flags = ("--max-steps", "6", *SMALL, "--max-grad-norm", "0.1", *more)
    flags = (*flags, "--shard-size", processes // 2, "--log-freq", 1)
    run(STAGE, processes, *flags, "-e", "a", "--save-dir", tmp_path, path=checked(tmp_path / "m"))
    assert metrics(tmp_path / "a")[6]["train/loss"] < metrics(tmp_path / "a")[1]["train/loss"]


def test_a_shard_size_that_does_not_divide():
    result = run(STAGE, 2, *TWELVE, "--shard-size", 3, check=False)
    assert result.errors == ["train-llm.py: error: --shard-size 3: does not divide 2 processes"]


def test_machines_of_different_sizes_need_a_shard_size(tmp_path):
    """The default is the number of processes of a machine. Here that is 2 for two ranks and 1 for
    the third, as with 8, 8 and 4 GPUs: without the comparison each would build another mesh."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if 'RANK' in os.environ:\n"
        "    os.environ['LOCAL_WORLD_SIZE'] = '1' if os.environ['RANK'] == '2' else '2'\n"
    )
    flags = (STAGE, 3, *SMALL, "--max-steps", "1")
    result = run(*flags, check=False, PYTHONPATH=str(tmp_path))
    assert result.returncode != 0
    assert result.errors == ["train-llm.py: error: --shard-size 2: does not divide 3 processes"]
    run(*flags, "--shard-size", "3", PYTHONPATH=str(tmp_path))

"""Laws 3 and 4: any checkpoint, any stage, any number of processes; stop it anywhere."""

import itertools
import json
import os
import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from conftest import (
    FAULTS,
    SMALL,
    assert_same_curve,
    end,
    exact,
    finish,
    fork,
    metrics,
    mount_small_disk,
    run,
    same_bits,
    script,
)

# A schedule that does not depend on the total, so that --max-steps says where a run stops.
STEADY = (*SMALL, "--log-freq", "1", "--dtype", "fp32", "--lr-scheduler", "constant_with_warmup")
STEADY += ("--warmup-steps", "5", "--seed", "1")
# A schedule over 12 steps, with a checkpoint after every third.
SAVING = (*SMALL, "--log-freq", "1", "--max-steps", "12", "--ckpt-freq", "3", "--seed", "2")
CONFIGURATIONS = [
    ("01-single-gpu", 1),
    ("02-ddp", 2),
    ("03-fsdp", 2),
    ("03-fsdp", 4),
    ("04-compression", 4),
    ("05-multinode", 3),
]


def walk_over_all_pairs(places):
    """Goes from each place to each other once, and ends where it began: 0 1 0 2 … 1 2 1 3 … 0."""
    pairs = itertools.combinations(places, 2)
    return [place for pair in pairs for place in pair] + places[:1]


WALK = walk_over_all_pairs(CONFIGURATIONS)
# In three parts, each of ten changes.
PARTS = [WALK[first : first + 11] for first in (0, 10, 20)]
# From the first to the last stages, and back.
SHORT = [CONFIGURATIONS[place] for place in (0, 4, 0)]
DIED = -9
FILES = ["__0_0.distcp", ".metadata", "state.json"]


def named(folder):
    return ("-e", "a", "--save-dir", folder)


@pytest.mark.law3
def test_the_walk_makes_each_change_once():
    changes = list(itertools.pairwise(WALK))
    assert sorted(changes) == sorted(itertools.permutations(CONFIGURATIONS, 2))
    assert [change for part in PARTS for change in itertools.pairwise(part)] == changes


@pytest.mark.law3
@pytest.mark.parametrize(
    "walk", [SHORT, *[pytest.param(part, marks=pytest.mark.slow) for part in PARTS]]
)
def test_a_run_changes_its_stage_and_its_number_of_processes(walk, curve, tmp_path):
    """Three steps on each. The curve is that of stage 01, which nothing interrupts. A resume on the
    same stage and processes is the same to the last bit: the tests of kills see to that."""
    for number, (stage, processes) in enumerate(walk):
        flags = (*exact(stage, processes), *STEADY, *named(tmp_path), "--max-steps", 3 + 3 * number)
        out = run(stage, processes, *flags).out
        assert (f"resumed from {tmp_path}/a/step-{3 * number:08d}" in out) == (number > 0)
    whole = curve(*CONFIGURATIONS[0], *STEADY, "--max-steps", 33)
    resumed = metrics(tmp_path / "a")
    assert list(resumed) == list(range(1, 3 * len(walk) + 1))
    assert_same_curve(whole, resumed, resumed)


@pytest.fixture(scope="session")
def uninterrupted(curve):
    return lambda stage, processes: curve(stage, processes, *SAVING)


# Instants inside the second save of a run, at step 6, and the step that the next start resumes.
INSTANTS = {
    "before the files are written": ("open step-00000006.tmp/__0_0.distcp 1", 3),
    "between the files": ("open step-00000006.tmp/.metadata 1", 3),
    "before the plain values": ("open step-00000006.tmp/state.json 1", 3),
    # The first rename there is of DCP's own metadata.
    "before the rename": ("os.rename step-00000006.tmp 2", 3),
    "after the rename": ("os.rename step-00000003.old 1", 6),
    "in the removal of an old one": ("shutil.rmtree step-00000003.old 1", 6),
    "during the export": ("os.rename final_model.tmp 1", 12),
}


QUICK_INSTANTS = ["before the rename", "after the rename"]


@pytest.mark.law4
@pytest.mark.parametrize(
    "instant",
    [x if x in QUICK_INSTANTS else pytest.param(x, marks=pytest.mark.slow) for x in INSTANTS],
)
def test_a_kill_inside_a_save(instant, uninterrupted, tmp_path):
    """It costs the work since the last finished checkpoint, never a checkpoint."""
    strike, resumed_step = INSTANTS[instant]
    flags = (*SAVING, *named(tmp_path), "--keep-checkpoints", "1")
    faults = {"PYTHONPATH": str(FAULTS), "STRIKE": f"kill {strike}"}
    struck = run("01-single-gpu", 1, *flags, check=False, **faults)
    assert struck.returncode == DIED, struck.err
    again = run("01-single-gpu", 1, *flags)
    assert f"resumed from {tmp_path}/a/step-{resumed_step:08d}" in again.out
    assert same_bits(uninterrupted("01-single-gpu", 1), metrics(tmp_path / "a"), range(1, 13))
    left = {path.name for path in (tmp_path / "a").glob("step-*")}
    assert left == {"step-00000012"}
    assert (tmp_path / "a" / "final_model" / "step-00000012").exists()


@pytest.mark.law4
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_of_one_rank_inside_a_save(victim, uninterrupted, tmp_path):
    flags = (*SAVING, *named(tmp_path))
    faults = {"PYTHONPATH": str(FAULTS), "STRIKE_RANK": str(victim)}
    faults["STRIKE"] = f"kill open step-00000006.tmp/__{victim}_0.distcp 1"
    struck = run("03-fsdp", 2, *flags, check=False, **faults)
    assert struck.returncode != 0
    again = run("03-fsdp", 2, *flags)
    assert f"resumed from {tmp_path}/a/step-00000003" in again.out
    assert same_bits(uninterrupted("03-fsdp", 2), metrics(tmp_path / "a"), range(1, 13))


def kill_at_random_until_done(stage, processes, folder, kills, seed):
    """Kills a run `kills` times, each after a time that is drawn, and then lets it end."""
    draw = random.Random(seed)
    flags = (*exact(stage, processes), *SAVING, *named(folder))
    for _ in range(kills):
        process = fork(script(stage), None if processes == 1 else processes, *flags)
        log = Path(folder) / "a" / "metrics.jsonl"
        before = log.stat().st_mtime if log.exists() else 0
        deadline = time.monotonic() + 300
        # The clock starts when this start of the run has logged its first step.
        while time.monotonic() < deadline and process.poll() is None:
            if log.exists() and log.stat().st_size and log.stat().st_mtime > before:
                break
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 1.5))
        end(process)
    return run(stage, processes, *flags)


@pytest.mark.law4
@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "processes", "kills"),
    [
        ("01-single-gpu", 1, 2),
        ("02-ddp", 2, 4),
        ("03-fsdp", 2, 4),
        ("07-tensor-parallel", 4, 3),
        ("08-pipeline-parallel", 2, 3),
    ],
)
def test_kills_at_random_instants(stage, processes, kills, uninterrupted, tmp_path):
    kill_at_random_until_done(stage, processes, tmp_path, kills, seed=0)
    resumed = metrics(tmp_path / "a")
    assert list(resumed) == list(range(1, 13))
    assert same_bits(uninterrupted(stage, processes), resumed, range(1, 13))


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A finished run with all of its checkpoints, to be copied."""
    folder = tmp_path_factory.mktemp("finished")
    run("01-single-gpu", 1, *SAVING, *named(folder), "--keep-checkpoints", "9")
    return folder


@pytest.fixture
def copy(finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path


def truncate(path):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip(path):
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def empty(path):
    path.write_bytes(b"")


DAMAGES = [(how, file) for how in (truncate, flip, Path.unlink, empty) for file in FILES]
QUICK_DAMAGES = [(truncate, FILES[0]), (flip, FILES[1]), (flip, FILES[2]), (Path.unlink, FILES[0])]


@pytest.mark.law4
@pytest.mark.parametrize(
    ("damage", "file"),
    [pytest.param(*x, marks=() if x in QUICK_DAMAGES else pytest.mark.slow) for x in DAMAGES],
)
def test_a_damaged_checkpoint_is_named_and_skipped(damage, file, copy, uninterrupted):
    damage(copy / "a" / "step-00000012" / file)
    out = run("01-single-gpu", 1, *SAVING, *named(copy)).out
    assert f"{copy}/a/step-00000012 is damaged ({file})" in out
    assert f"resumed from {copy}/a/step-00000009" in out
    assert (copy / "a" / "step-00000012.damaged").is_dir()
    assert (copy / "a" / "step-00000012").is_dir()
    assert same_bits(uninterrupted("01-single-gpu", 1), metrics(copy / "a"), range(1, 13))


@pytest.mark.law4
@pytest.mark.slow
def test_damage_that_another_rank_finds(copy):
    """Two damaged ones in a row; each file is verified by one of 3 ranks, all go on together."""
    flip(copy / "a" / "step-00000012" / "__0_0.distcp")
    truncate(copy / "a" / "step-00000009" / ".metadata")
    out = run("03-fsdp", 3, *SAVING, *named(copy)).out
    assert "step-00000012 is damaged (__0_0.distcp)" in out
    assert "step-00000009 is damaged (.metadata)" in out
    assert f"resumed from {copy}/a/step-00000006" in out
    assert "cpu_offload" in json.loads((copy / "a/step-00000012/state.json").read_text())["flags"]
    # Stage 01 knows no such flag, and does not take it over.
    run("01-single-gpu", 1, *named(copy), "--max-steps", "13")
    state = json.loads((copy / "a/step-00000013/state.json").read_text())
    assert "cpu_offload" not in state["flags"]


@pytest.mark.law4
def test_nothing_intact_starts_anew_and_keeps_the_damaged(copy, uninterrupted):
    for step in (3, 6, 9, 12):
        flip(copy / "a" / f"step-{step:08d}" / "__0_0.distcp")
    out = run("01-single-gpu", 1, *SAVING, *named(copy)).out
    assert "resumed from /" not in out
    assert len(list((copy / "a").glob("*.damaged"))) == 4
    assert same_bits(uninterrupted("01-single-gpu", 1), metrics(copy / "a"), range(1, 13))


@pytest.mark.law4
def test_what_is_not_a_runs_own_stays(copy):
    """A start removes what a kill has left of a save, and nothing else."""
    for name in ("step-00000003.tmp", "step-00000006.old", "final_model.old", "step-notes.tmp"):
        (copy / "a" / name).mkdir()
    (copy / "a" / "notes.old").write_text("mine")
    run("01-single-gpu", 1, *named(copy))
    left = {path.name for path in (copy / "a").iterdir() if path.suffix in (".tmp", ".old")}
    assert left == {"final_model.old", "step-notes.tmp", "notes.old"}


@pytest.mark.law4
def test_a_finished_run_says_so(copy):
    before = (copy / "a" / "metrics.jsonl").read_text()
    out = run("01-single-gpu", 1, *named(copy)).out
    assert f"{copy}/a is finished at step 12" in out
    assert (copy / "a" / "metrics.jsonl").read_text() == before


@pytest.mark.law4
def test_a_run_without_its_export_exports(copy):
    shutil.rmtree(copy / "a" / "final_model")
    out = run("01-single-gpu", 1, *named(copy)).out
    assert "is finished" not in out
    assert (copy / "a" / "final_model" / "model.safetensors").exists()


@pytest.mark.law4
@pytest.mark.parametrize(
    ("flags", "total"),
    [(("--max-steps", "14"), 14), (("--max-steps", "99999", "--num-epochs", "1"), 864)],
)
def test_the_total_may_be_raised(copy, flags, total):
    """The schedule is recomputed, and the run says so. The rest of its flags stay."""
    process = fork(script("01-single-gpu"), None, *named(copy), *flags, "--ckpt-freq", 2)
    if total > 20:
        log = copy / "a" / "step-00000014"
        while not log.exists() and process.poll() is None:
            time.sleep(0.05)
        end(process)
    else:
        result = finish(process)
        assert f"scheduled over {total} steps, previously 12" in result.out
    lines = metrics(copy / "a")
    assert 14 in lines
    assert lines[13]["train/learning_rate"] > lines[12]["train/learning_rate"]


def test_flags_on_the_command_line_win_over_the_stored(copy):
    flags = (
        "--max-steps",
        "14",
        "--lr",
        "5e-4",
        "--lr-scheduler",
        "constant",
        "--weight-decay",
        "0",
    )
    run("01-single-gpu", 1, *named(copy), *flags)
    assert metrics(copy / "a")[14]["train/learning_rate"] == 5e-4
    state = json.loads((copy / "a" / "step-00000014" / "state.json").read_text())
    assert state["flags"]["global_batch_size"] == 8
    assert state["flags"]["weight_decay"] == 0
    assert state["flags"]["attn"] == "auto"  # what it came to on one machine binds no other


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--seed", "3"), "--seed 3: the run in {} has 2"),
        (
            ("-d", "dummy"),
            "--dataset-name dummy: the training data differs from that of the run in {} "
            "--dataset-name python-docs",
        ),
        (("-s", "32"), "--seq-length 32: the run in {} has 64"),
        (("--global-batch-size", "16"), "--global-batch-size 16: the run in {} has 8"),
    ],
)
def test_a_contradicting_resume_is_refused(copy, flags, said):
    result = run("01-single-gpu", 1, *named(copy), *flags, check=False)
    assert result.returncode == 2
    assert result.errors == ["train-llm.py: error: " + said.format(copy / "a")]


def test_flags_txt_repeats_the_run(copy, tmp_path, uninterrupted):
    again = ("-e", "b", "--save-dir", tmp_path)
    run("01-single-gpu", 1, f"@{copy}/a/flags.txt", *again)
    assert same_bits(uninterrupted("01-single-gpu", 1), metrics(tmp_path / "b"), range(1, 13))


@pytest.mark.law4
def test_old_checkpoints_are_pruned(tmp_path):
    run("01-single-gpu", 1, *SAVING, *named(tmp_path), "--keep-checkpoints", "2")
    kept = sorted(path.name for path in (tmp_path / "a").glob("step-*"))
    assert kept == ["step-00000009", "step-00000012"]


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    mount_small_disk(folder, 20)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.law4
@pytest.mark.parametrize(
    "when", [pytest.param("before the save", marks=pytest.mark.slow), "during the save"]
)
def test_a_full_disk(when, small_disk, uninterrupted):
    """20 MB hold two checkpoints of 8 MB, not three. The error is a line, what was saved stays."""
    flags = (*SAVING, *named(small_disk))
    faults = {}
    if when == "during the save":
        faults = {"PYTHONPATH": str(FAULTS), "FILL": str(small_disk)}
        faults["STRIKE"] = "fill open step-00000006.tmp/__0_0.distcp 1"
    result = run("01-single-gpu", 1, *flags, "--keep-checkpoints", "5", check=False, **faults)
    step = 6 if faults else 9
    assert result.returncode == 2
    assert len(result.errors) == 1
    assert "Traceback" not in result.err
    assert f"--save-dir {small_disk}/a: step-{step:08d} not saved" in result.errors[0]
    assert "bytes are free" in result.errors[0]
    (small_disk / "filler").unlink(missing_ok=True)
    again = run("01-single-gpu", 1, *flags, "--keep-checkpoints", "1", check=False)
    assert f"resumed from {small_disk}/a/step-{step - 3:08d}" in again.out


def fill(disk):
    with (disk / "filler").open("wb") as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(1 << 16))
            file.flush()


@pytest.mark.law4
@pytest.mark.slow
def test_a_disk_that_fills_between_saves(small_disk):
    """The log is what meets it, in the run and at the next start. Both end in a line."""
    flags = (*STEADY, *named(small_disk))
    run("01-single-gpu", 1, *flags, "--max-steps", 6)
    log = small_disk / "a" / "metrics.jsonl"
    said = "the disk is full"
    for step in (8, 0):
        process = fork(script("01-single-gpu"), None, *flags, "--max-steps", 2000)
        while step and process.poll() is None and f'"step": {step},' not in log.read_text():
            time.sleep(0.02)
        if step:
            fill(small_disk)
        result = finish(process)
        assert result.returncode == 2
        assert result.errors == [f"train-llm.py: error: --save-dir {small_disk}/a: {said}"]
        assert "Traceback" not in result.err
        said = "[Errno 28] No space left on device"
    (small_disk / "filler").unlink()
    # Two checkpoints fit, and not the export beside them.
    result = run("01-single-gpu", 1, *flags, "--max-steps", 12, check=False)
    assert result.returncode == 2
    assert f"--save-dir {small_disk}/a: final_model was not written: " in result.errors[0]
    assert list(metrics(small_disk / "a")) == list(range(1, 13))
    shutil.rmtree(small_disk / "a" / "step-00000006")
    out = run("01-single-gpu", 1, *flags, "--max-steps", 12).out
    assert f"resumed from {small_disk}/a/step-00000012" in out
    assert (small_disk / "a" / "final_model" / "step-00000012").exists()


@pytest.mark.law4
def test_a_full_disk_under_several_ranks(small_disk):
    flags = (*SAVING, *named(small_disk), "--keep-checkpoints", "5")
    result = run("03-fsdp", 2, *flags, check=False)
    assert result.returncode != 0
    assert len(result.errors) == 1
    assert (small_disk / "a" / "step-00000006").exists()
    assert not list((small_disk / "a").glob("*.tmp"))

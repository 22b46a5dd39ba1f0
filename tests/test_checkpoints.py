"""Laws 3 and 4: any checkpoint, any stage, any number of processes; stop it anywhere."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
from conftest import (
    FAULTS,
    SMALL,
    assert_same_curve,
    end,
    exact,
    finish,
    fork,
    load,
    metrics,
    mount_small_disk,
    mutant,
    run,
    same_bits,
    save_tokenizer,
    script,
)
from nodes import last_step, wait_until
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import BartConfig, LlamaConfig

# A schedule that does not depend on the total, so that --max-steps says where a run stops.
STEADY = (*SMALL, "--log-freq", "1", "--dtype", "fp32", "--lr-scheduler", "constant")
STEADY += ("--warmup-steps", "5", "--seed", "1")
# A schedule over 12 steps, with a checkpoint after every third.
SAVING = (*SMALL, "--log-freq", "1", "--max-steps", "12", "--ckpt-freq", "3", "--seed", "2")
CONFIGURATIONS = [
    ("01-single-gpu", 1),
    ("02-ddp", 2),
    ("03-fsdp", 4),
    ("04-compression", 2),
    ("05-multinode", 3),
    ("07-tensor-parallel", 4),
    ("08-pipeline-parallel", 4),
    ("09-context-parallel", 4),
]


# Up, and down in larger steps.
WALK = [*CONFIGURATIONS, *CONFIGURATIONS[-3::-2]]
# From the first to the last stage, and back.
SHORT = [CONFIGURATIONS[place] for place in (0, 6, 4, 2, 0)]
DIED = -9
FILES = ["__0_0.distcp", ".metadata", "state.json"]


def named(folder):
    return ("-e", "a", "--save-dir", folder)


@pytest.mark.law3
@pytest.mark.parametrize("walk", [SHORT, pytest.param(WALK, marks=pytest.mark.slow)])
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


# Instants in the second save of a run, at step 6, and in its export: the operation before which it
# is killed, and the step that the next start resumes.
INSTANTS = {
    "before the tensors are written": ("open step-00000006.tmp/__0_0.distcp 1", 3),
    "between tensors and metadata": ("open step-00000006.tmp/.metadata 1", 3),
    "before the plain values are written": ("open step-00000006.tmp/state.json 1", 3),
    "before the rename": ("os.rename step-00000006.tmp 2", 3),
    "after the rename": ("os.rename step-00000003.tmp 3", 6),
    "while an old one is removed": ("os.remove __0_0.distcp 1", 6),
    "while the weights are exported": ("open final_model/config.json 1", 12),
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
    whole, resumed = uninterrupted("01-single-gpu", 1), metrics(tmp_path / "a")
    assert same_bits(whole, resumed, range(1, 13))
    assert resumed[12]["eval/loss"] == whole[12]["eval/loss"]
    left = {path.name for path in (tmp_path / "a").glob("step-*")}
    assert left == {"step-00000012"}
    assert (tmp_path / "a" / "final_model" / "model.safetensors").exists()


@pytest.mark.law4
@pytest.mark.slow
def test_a_kill_of_one_rank_inside_a_save(uninterrupted, tmp_path):
    flags = (*SAVING, *named(tmp_path))
    faults = {"PYTHONPATH": str(FAULTS), "STRIKE_RANK": "1"}
    faults["STRIKE"] = "kill open step-00000006.tmp/__1_0.distcp 1"
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
        ("01-single-gpu", 1, 3),
        ("03-fsdp", 2, 3),
        ("08-pipeline-parallel", 2, 2),
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


def empty(path):
    path.write_bytes(b"")


def strike(action, rank=0):
    """An environment in which an operation fails, see tests/support/faults."""
    return {"PYTHONPATH": str(FAULTS), "STRIKE": action, "STRIKE_RANK": str(rank)}


DAMAGES = [(truncate, FILES[0]), (Path.unlink, FILES[1]), (empty, FILES[2])]


@pytest.mark.law4
@pytest.mark.parametrize(("damage", "file"), DAMAGES)
def test_a_checkpoint_that_cannot_be_loaded_is_left_as_it_is(damage, file, copy, uninterrupted):
    """The files may be whole, and the packages of another version. Without the folder the run goes
    on from the checkpoint before it."""
    newest = copy / "a" / "step-00000012"
    damage(newest / file)
    before = sorted(copy.rglob("*"))
    result = run("01-single-gpu", 1, *SAVING, *named(copy), check=False)
    assert result.returncode == 1
    assert "load_checkpoint" in result.err
    assert sorted(copy.rglob("*")) == before
    shutil.rmtree(newest)
    out = run("01-single-gpu", 1, *SAVING, *named(copy)).out
    assert f"resumed from {copy}/a/step-00000009" in out
    assert same_bits(uninterrupted("01-single-gpu", 1), metrics(copy / "a"), range(1, 13))


# What a network file system may answer to one of the ranks.
READS = ["state.json", ".metadata", "__0_0.distcp"]


@pytest.mark.law4
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "file", [x if x == READS[1] else pytest.param(x, marks=pytest.mark.slow) for x in READS]
)
def test_ranks_go_on_from_the_same_step_or_not_at_all(file, rank, copy):
    """One rank cannot read a file of the newest checkpoint, a single time."""
    before = sorted(copy.rglob("*"))
    faults = strike(f"ESTALE open step-00000012/{file} 1", rank)
    flags = (*SAVING, *named(copy), "--max-steps", "15")
    result = run("02-ddp", 2, *flags, check=False, **faults)
    assert result.returncode != 0
    assert "Stale file handle" in result.err
    assert sorted(copy.rglob("*")) == before


@pytest.mark.law4
def test_a_file_system_without_locks(tmp_path):
    """flock fails on Lustre that is mounted without it, and on some FUSE mounts."""
    flags = (*SMALL, *named(tmp_path), "--max-steps", "2")
    out = run("01-single-gpu", 1, *flags, **strike("ENOSYS fcntl.flock 6 1")).out
    assert f"{tmp_path}/a cannot be locked: start only one run there" in out
    assert (tmp_path / "a" / "final_model").exists()


@pytest.mark.law4
def test_an_old_checkpoint_that_cannot_be_removed(tmp_path):
    """The new one is saved all the same, and the next start does not stumble over what is left."""
    flags = (*SAVING, *named(tmp_path), "--keep-checkpoints", "1")
    faults = strike("EACCES os.remove __0_0.distcp 1")
    run("01-single-gpu", 1, *flags, "--max-steps", "6", **faults)
    assert (tmp_path / "a" / "step-00000003.tmp").exists()
    faults = strike("EACCES os.remove __0_0.distcp 1")  # at the start
    out = run("01-single-gpu", 1, *flags, "--max-steps", "9", **faults).out
    assert f"resumed from {tmp_path}/a/step-00000006" in out
    assert (tmp_path / "a" / "step-00000009").exists()


@pytest.mark.law4
@pytest.mark.slow
def test_an_export_that_takes_longer_than_the_timeout(tmp_path):
    """The other ranks wait for it in a group with a long timeout."""
    flags = (*SMALL, *named(tmp_path), "--max-steps", "2", "--timeout", "20")
    slow = strike("sleep:35 open final_model/config.json 1")
    run("05-multinode", 2, *exact("05-multinode", 2), *flags, **slow)
    assert (tmp_path / "a" / "final_model" / "model.safetensors").exists()


@pytest.mark.law3
def test_a_parameter_without_a_gradient(tmp_path, curve):
    """A decoder with a cross-attention that nothing uses. Its moments begin when it is used."""
    sizes = {"d_model": 32, "decoder_layers": 1, "decoder_ffn_dim": 64}
    config = BartConfig(vocab_size=1024, decoder_attention_heads=2, **sizes, pad_token_id=0)
    config.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    flags = (*STEADY, "-m", tmp_path / "model", "--from-scratch")
    whole = curve("01-single-gpu", 1, *flags, "--max-steps", 6)
    run("01-single-gpu", 1, *flags, *named(tmp_path), "--max-steps", 3)
    saved = FileSystemReader(tmp_path / "a" / "step-00000003").read_metadata().state_dict_metadata
    unused = [k for k in saved if k.startswith("model.") and f"moments{k[5:]}.step" not in saved]
    assert any("encoder_attn" in name for name in unused)
    out = run("03-fsdp", 2, *flags, *named(tmp_path), "--max-steps", 6).out
    assert re.search(r"the moments of \d+ parameters begin anew", out)
    assert_same_curve(whole, metrics(tmp_path / "a"), range(1, 7), learns=False)


@pytest.mark.law3
def test_the_moments_of_any_optimizer(tmp_path, capsys):
    """SGD's momentum has no `step`, and is resumed. AdamW finds none of its moments: they begin
    anew, which is said. Nothing else is lost."""
    load("01-single-gpu")
    import logs_and_checkpoints as module

    def trained(optimizer_class, steps, resume, **options):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = optimizer_class(model.parameters(), 0.1, **options)
        if resume:
            module.load_checkpoint(tmp_path, model, optimizer, {}, {})
            return model, optimizer
        for step in range(steps):
            model(torch.ones(3) * step).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        values = {"experiment": {}, "flags": {}}
        module.save_checkpoint(tmp_path, steps, model, optimizer, values, 2)
        return model, optimizer

    model, optimizer = trained(torch.optim.SGD, 3, False, momentum=0.9)
    again, resumed = trained(torch.optim.SGD, 0, True, momentum=0.9)
    assert torch.equal(model.weight, again.weight)
    momentum = optimizer.state[model.weight]["momentum_buffer"]
    assert torch.equal(momentum, resumed.state[again.weight]["momentum_buffer"])
    assert "begin anew" not in capsys.readouterr().out
    again, resumed = trained(torch.optim.AdamW, 0, True)
    assert torch.equal(model.weight, again.weight)
    assert not resumed.state[again.weight] or resumed.state[again.weight]["step"] == 0
    assert "the moments of 2 parameters begin anew" in capsys.readouterr().out


@pytest.mark.law4
def test_a_finished_run_trains_no_step(copy):
    """Started again it evaluates and exports once more, the same bits, as after a kill in there."""
    weights = copy / "a" / "final_model" / "model.safetensors"
    before, lines = weights.read_bytes(), metrics(copy / "a")
    shutil.rmtree(weights.parent)
    run("01-single-gpu", 1, *SAVING, *named(copy))
    assert weights.read_bytes() == before
    assert metrics(copy / "a") == lines


@pytest.mark.law4
def test_flags_that_change_are_said(copy):
    """A run may go on with more steps, another rate and other hardware. It says what changed."""
    flags = (*SAVING, *named(copy), "--max-steps", "14", "--lr", "5e-4", "-b", "2")
    out = run("01-single-gpu", 1, *flags, "--lr-scheduler", "constant").out
    changed = {line for line in out.splitlines() if " → " in line}
    expected = {"keep_checkpoints: 9 → 2", "max_steps: 12 → 14", "lr: 0.002 → 0.0005"}
    expected |= {"lr_scheduler: cosine → constant", "batch_size: 4 → 2"}
    assert {line for line in changed if not line.startswith("save_dir: ")} == expected
    assert metrics(copy / "a")[14]["train/learning_rate"] == 5e-4


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "bos_token_id": 0, "eos_token_id": 0}


def write_model(folder, **more):
    LlamaConfig(**SIZES | {"vocab_size": 1024, **more}).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def write_text(path, seed):
    path.parent.mkdir(exist_ok=True)
    draw = random.Random(seed)
    path.write_text(" ".join(draw.choice("abcdefgh") * 3 for _ in range(9000)))
    return path


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--seed", "3"), "seed is 3, but 2 in {}/step-00000012: use another -e"),
        (("-s", "32"), "seq_length is 32, but 64 in {}/step-00000012: use another -e"),
        (("--global-batch-size", "16"), "global_batch_size is 16, but 8 in {}/step-00000012: "),
        (("-d", "dummy"), "data_crc is "),
        (("-m", "{}/model", "--from-scratch"), "config."),
    ],
)
def test_another_experiment_is_refused(copy, flags, said):
    write_model(copy / "a" / "model")
    flags = [flag.format(copy / "a") for flag in flags]
    result = run("01-single-gpu", 1, *SAVING, *named(copy), *flags, check=False)
    assert result.returncode == 1
    [line] = result.errors
    assert line.startswith("train-llm.py: error: " + said.format(copy / "a"))


@pytest.mark.law3
def test_contents_count_and_not_names(tmp_path):
    """Model and data that have moved are the same. Other ones under the old names are not, also
    where the weights have the same shapes."""
    model = write_model(tmp_path / "model")
    text = write_text(tmp_path / "data" / "text.txt", seed=0)
    flags = (*SMALL, *named(tmp_path), "--seed", "2", "--from-scratch")
    run("01-single-gpu", 1, *flags, "-m", model, "-d", text, "--max-steps", "2")
    other_model = shutil.copytree(model, tmp_path / "moved")
    other_text = shutil.copytree(text.parent, tmp_path / "moved-data") / "text.txt"
    out = run("01-single-gpu", 1, *flags, "-m", other_model, "-d", other_text, "--max-steps", 4).out
    assert f"dataset_name: {text} → {other_text}" in out
    assert list(metrics(tmp_path / "a")) == [1, 2, 3, 4]

    write_model(model, rms_norm_eps=0.1)
    refused = run("01-single-gpu", 1, *flags, "-m", model, "-d", text, check=False)
    assert "config.rms_norm_eps is 0.1, but 1e-06 in " in refused.errors[0]
    write_text(text, seed=1)
    refused = run("01-single-gpu", 1, *flags, "-m", other_model, "-d", text, check=False)
    assert "data_crc is " in refused.errors[0]


@pytest.mark.law1
def test_ranks_with_other_files_are_told_apart(tmp_path):
    """As on machines whose files have the same names, but not the same contents."""
    for rank in range(2):
        write_text(tmp_path / str(rank) / "text.txt", seed=rank)
    (tmp_path / "path").mkdir()
    # Each rank begins in a folder of its own, and believes that it is the first of its machine.
    code = "import os; 'RANK' in os.environ and os.chdir(os.environ['FOLDER'] + os.environ['RANK'])"
    (tmp_path / "path" / "sitecustomize.py").write_text(code)
    faults = {"PYTHONPATH": str(tmp_path / "path"), "FOLDER": f"{tmp_path}/"}
    flags = (*SMALL, "-d", "text.txt", "--max-steps", 2)
    result = run("02-ddp", 2, *flags, check=False, **faults)
    assert result.returncode != 0
    [line] = result.errors
    assert line.startswith("train-llm.py: error: data_crc is ")
    assert line.endswith(" on rank 1: give all ranks the same flags and files")


def test_a_checkpoint_of_an_earlier_version_of_the_course_is_refused(copy):
    """It had sentences as names, which no check would compare."""
    path = copy / "a" / "step-00000012" / "state.json"
    state = json.loads(path.read_text())
    state["experiment"] = {f"--{name}": value for name, value in state["experiment"].items()}
    path.write_text(json.dumps(state))
    [line] = run("01-single-gpu", 1, *SAVING, *named(copy), check=False).errors
    assert f"seq_length is 64, but None in {path.parent}" in line


def test_a_file_of_flags(tmp_path, uninterrupted):
    flags = (*SAVING, *named(tmp_path))
    (tmp_path / "flags.txt").write_text("\n".join(map(str, flags)))
    # A pipe, such as that of @<(command), can be read only once.
    os.mkfifo(tmp_path / "pipe")
    writer = subprocess.Popen(["cp", tmp_path / "flags.txt", tmp_path / "pipe"])
    run("01-single-gpu", 1, f"@{tmp_path}/pipe")
    assert writer.wait(timeout=60) == 0
    assert same_bits(uninterrupted("01-single-gpu", 1), metrics(tmp_path / "a"), range(1, 13))


@pytest.mark.law4
def test_a_run_that_diverges_ends_and_keeps_its_checkpoints(tmp_path):
    """One line, before a save. What is saved has finite numbers, also with a save in each step."""
    flags = (*SMALL, *named(tmp_path), "--lr", "1e30", "--warmup-steps", "0", "--log-freq", "100")
    result = run("01-single-gpu", 1, *flags, "--max-steps", 99, "--ckpt-freq", 1, check=False)
    assert result.returncode == 1
    [line] = result.errors
    assert " the loss is " in line and line.endswith("try a lower --lr")
    saved = sorted((tmp_path / "a").glob("step-????????"))
    assert len(saved) in (1, 2)
    for folder in saved:
        dcp_to_torch_save(folder, tmp_path / "whole")
        for tensor in torch.load(tmp_path / "whole")["model"].values():
            assert tensor.isfinite().all()


@pytest.mark.law4
def test_a_second_run_with_the_same_name_waits_and_is_refused(tmp_path):
    """The first one goes on. A kill releases the folder, and one that waits trains on."""
    flags = (*SMALL, *named(tmp_path), "--log-freq", "1", "--ckpt-freq", "5")
    first = fork(script("01-single-gpu"), None, *flags, "--num-epochs", 9999)
    wait_until(lambda: list(tmp_path.glob("a/step-????????")), "a checkpoint")
    path = mutant(tmp_path / "copy", "01-single-gpu")
    module = path.parent.parent / "logs_and_checkpoints.py"
    module.write_text(module.read_text().replace("in range(120):", "in range(2):"))
    second = run("01-single-gpu", 1, *flags, path=path, check=False)
    said = f"-e a: another process trains in {tmp_path}/a"
    assert second.errors == [f"train-llm.py: error: {said}"]
    assert first.poll() is None
    third = fork(script("01-single-gpu"), None, *flags, "--num-epochs", 9999)
    files = psutil.Process(third.pid).open_files
    wait_until(lambda: any(file.path == f"{tmp_path}/a/lock" for file in files()), "the third run")
    end(first)
    last = last_step(tmp_path / "a")
    wait_until(lambda: last_step(tmp_path / "a") > last, "another step")
    end(third)
    steps = list(metrics(tmp_path / "a"))
    assert steps == list(range(1, len(steps) + 1))


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
    ("stage", "processes"),
    [("01-single-gpu", 1), pytest.param("03-fsdp", 2, marks=pytest.mark.slow)],
)
def test_a_full_disk(stage, processes, small_disk):
    """20 MB hold two checkpoints of 8 MB, not three. What was saved stays."""
    flags = (*SAVING, *named(small_disk))
    result = run(stage, processes, *flags, "--keep-checkpoints", "5", check=False)
    assert result.returncode != 0
    assert "step-00000009" not in {path.name for path in (small_disk / "a").iterdir()}
    again = run(stage, processes, *flags, "--keep-checkpoints", "1", check=False)
    assert f"resumed from {small_disk}/a/step-00000006" in again.out


@pytest.mark.law4
def test_a_disk_that_is_too_full_for_the_log(small_disk):
    """The steps go on. Only the last checkpoint, which cannot be saved, ends the run."""
    flags = (*SMALL, *named(small_disk), "--log-freq", "1", "--max-steps", "200")
    process = fork(script("01-single-gpu"), None, *flags)
    wait_until(lambda: last_step(small_disk / "a") > 0, "a step")
    process.send_signal(signal.SIGSTOP)
    status = os.statvfs(small_disk)
    (small_disk / "fill").write_bytes(bytes(status.f_bavail * status.f_bsize - 8000))
    process.send_signal(signal.SIGCONT)
    result = finish(process)
    assert "metrics cannot be written, training goes on: [Errno 28] No space left" in result.out
    assert "step   200/200" in result.out and result.returncode != 0

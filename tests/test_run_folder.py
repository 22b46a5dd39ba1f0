"""A run's folder belongs to one run at a time, and what stands in it ends no run in a traceback."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import zlib

import psutil
import pytest
from conftest import (
    SMALL,
    STAGES,
    TIMEOUT,
    end,
    environment,
    exact,
    finish,
    fork,
    metrics,
    mount_small_disk,
    run,
    script,
    start,
)
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

ENDLESS = (*SMALL, "--max-steps", "100000", "--log-freq", "1", "--ckpt-freq", "5")


def named(folder, *flags):
    return ("-e", "a", "--save-dir", folder, *flags)


def wait_for(condition, process):
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def line_of(result):
    assert result.returncode not in (0, None), result.out
    [line] = result.errors
    return line.removeprefix("train-llm.py: error: ")


# Two runs with one name.


@pytest.mark.law4
def test_a_second_run_with_the_same_name_is_refused(tmp_path):
    """It names the first. That one goes on, and its log is whole. A kill releases the folder."""
    flags = named(tmp_path, *ENDLESS)
    first = fork(script("01-single-gpu"), None, *flags)
    wait_for(lambda: list(tmp_path.glob("a/step-????????")), first)
    line = line_of(run("01-single-gpu", 1, *flags, check=False))
    holder = f"process {first.pid} on {socket.gethostname()} trains in {tmp_path}/a"
    assert line.startswith(f"-e a: {holder}: end it, or choose another name (if its machine is ")
    assert first.poll() is None
    end(first)
    metrics(tmp_path / "a")  # no step twice
    last = max(metrics(tmp_path / "a"))
    run("01-single-gpu", 1, *named(tmp_path, "--max-steps", last + 5))
    assert list(metrics(tmp_path / "a")) == list(range(1, last + 6))


@pytest.mark.law4
@pytest.mark.slow
@pytest.mark.parametrize("stage", ["02-ddp", "05-multinode"])
def test_processes_end_with_torchrun(stage, tmp_path):
    """torchrun is killed by kill -9. Its processes end by themselves, and the run can go on."""
    flags = named(tmp_path, *ENDLESS, *exact(stage, 2))
    first = start(script(stage), 2, *flags)
    wait_for(lambda: list(tmp_path.glob("a/step-????????")), first)
    workers = psutil.Process(first.pid).children(recursive=True)
    assert len(workers) >= 2
    first.kill()
    first.communicate()
    _, alive = psutil.wait_procs(workers, timeout=60)
    for worker in alive:
        worker.kill()
    assert not alive
    saved = int(max(tmp_path.glob("a/step-????????")).name[5:])
    result = run(stage, 2, *named(tmp_path, *exact(stage, 2), "--max-steps", saved + 3))
    assert f"resumed from {tmp_path}/a/step-{saved:08d}" in result.out


@pytest.mark.slow
def test_a_restart_is_the_same_run(tmp_path):
    """torchrun starts the processes again, and they get the lock of those that have ended."""
    flags = named(tmp_path, *SMALL, "--max-steps", 30, "--log-freq", "1", "--ckpt-freq", "5")
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    command += [str(script("05-multinode")), *map(str, flags), *map(str, exact("05-multinode", 2))]
    variables = environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    process = subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: list(tmp_path.glob("a/step-????????")), process)
    psutil.Process(process.pid).children()[0].kill()
    result = finish(process)
    assert result.returncode == 0, result.err
    assert list(metrics(tmp_path / "a")) == list(range(1, 31))


# What stands in the folder.


@pytest.fixture
def copy(tmp_path):
    run("01-single-gpu", 1, *named(tmp_path, *SMALL, "--max-steps", 4, "--ckpt-freq", "2"))
    return tmp_path / "a"


def sign(folder, **changes):
    """Writes a state.json with other values, and with its right checksum."""
    values = json.loads((folder / "state.json").read_text())
    values.pop("crc32")
    for name, value in changes.items():
        if value is None:
            values.pop(name)
        else:
            values[name] = value
    values["crc32"] = zlib.crc32(json.dumps(values).encode())
    (folder / "state.json").write_text(json.dumps(values))


@pytest.mark.law4
@pytest.mark.parametrize("missing", ["files", "flags", "step"])
def test_a_signed_state_that_lacks_a_value_is_damaged(missing, copy):
    sign(copy / "step-00000004", **{missing: None})
    result = run("01-single-gpu", 1, *named(copy.parent, "--max-steps", 6))
    assert f"{copy}/step-00000004 is damaged (state.json): renamed .damaged" in result.out
    assert f"resumed from {copy}/step-00000002" in result.out


@pytest.mark.law4
def test_files_where_folders_are_expected(copy):
    """They are in the way of what a resume renames and removes. It removes them."""
    (copy / "step-00000004" / "state.json").write_text("{")
    for name in ("step-00000004.damaged", "step-00000003.old", "step-00000006.tmp"):
        (copy / name).write_text("a file")
    shutil.rmtree(copy / "final_model")
    (copy / "final_model").write_text("a file")
    (copy / "final_model.tmp").write_text("a file")
    run("01-single-gpu", 1, *named(copy.parent, "--max-steps", 6))
    assert (copy / "final_model" / "step-00000006").exists()
    assert (copy / "step-00000004.damaged").is_dir()


@pytest.mark.parametrize("name", ["lock", "metrics.jsonl", "flags.txt", "tensorboard"])
@pytest.mark.parametrize("kind", ["folder", "full device", "garbage"])
def test_odd_files_in_the_folder(name, kind, copy):
    """One line, at once: to read the device to its end would take forever."""
    path = copy / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "full device":
        path.symlink_to("/dev/full")
    else:
        path.write_bytes(b"\xff\xfe{]\n}\n")
    result = run("01-single-gpu", 1, *named(copy.parent, "--max-steps", 6), check=False)
    if result.returncode != 0:
        assert f"--save-dir {copy.parent}" in line_of(result)
        assert "Traceback" not in result.err
    assert (copy / "step-00000004" / "state.json").exists()
    path.unlink() if not path.is_dir() else shutil.rmtree(path)
    run("01-single-gpu", 1, *named(copy.parent, "--max-steps", 6))


@pytest.mark.slow
def test_a_folder_of_another_user(copy):
    """It may be read, and not be written to. Root may do everything, so it drops that right."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("to give a folder to another user one has to be root and have setpriv")
    for path in (copy, *copy.rglob("*")):
        os.chown(path, 12345, 12345)
    before = sorted(copy.rglob("*"))
    command = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable]
    command += [script("01-single-gpu"), *named(copy.parent, "--max-steps", 6)]
    result = subprocess.run(
        [str(word) for word in command],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert result.returncode == 2, result.stderr
    said = f"train-llm.py: error: --save-dir {copy.parent}: [Errno 13] Permission denied"
    assert result.stderr.startswith(said)
    assert "Traceback" not in result.stderr
    assert sorted(copy.rglob("*")) == before


@pytest.mark.law4
@pytest.mark.slow
def test_no_inode_left(tmp_path):
    """A disk with room for bytes, and for no further file, at each instant of a run."""
    disk = tmp_path / "disk"
    mount_small_disk(disk, 60)
    try:
        flags = ("-e", "a", "--save-dir", disk, *SMALL, "--max-steps", "4", "--ckpt-freq", "2")
        subprocess.run(["mount", "-o", "remount,nr_inodes=200", str(disk)], check=True)
        refused = 0
        for spare in range(16):
            for i in range(1000):
                try:
                    (disk / f"filler-{i}").touch()
                except OSError:
                    break
            for j in range(max(0, i - spare), i):
                (disk / f"filler-{j}").unlink()
            result = run("01-single-gpu", 1, *flags, check=False)
            if result.returncode != 0:
                refused += 1
                assert "No space left" in line_of(result) or "disk" in line_of(result)
                assert "Traceback" not in result.err
            for filler in disk.glob("filler-*"):
                filler.unlink()
        assert refused > 3
        run("01-single-gpu", 1, *flags)
        assert (disk / "a" / "final_model" / "step-00000004").exists()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# Names.

ODD_NAMES = ["-foo", "@x", "a\nb", "a\u2028b", "x" * 300, "x" * 5000, "\udc80", "é ü", "a b", "'"]
ODD_NAMES += ['"', "\\", "a/b", "..", "$HOME", "", " ", "a=b", "--lr", "\t", "🙂"]


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(name=st.one_of(st.sampled_from(ODD_NAMES), st.text(min_size=1, max_size=300)))
@example(name="-foo")
@example(name="@x")
@example(name="a\u2028b")
@example(name="x" * 5000)
@example(name="\udc80")
def test_a_name_is_refused_or_survives_flags_txt(name, tmp_path):
    """A property: either one line, or @flags.txt repeats the run with the same name."""
    if "\0" in name or ".." in name:  # no program can get the first; the second leaves tmp_path
        return
    folder = tmp_path / str(time.monotonic_ns())
    flags = (f"--save-dir={folder}", *SMALL, "--max-steps", "1", "--num-epochs", "1")
    with contextlib.suppress(UnicodeEncodeError):
        name.encode()
        result = run("01-single-gpu", 1, f"--experiment-name={name}", *flags, check=False)
        if result.returncode != 0:
            assert result.errors, result.err
            assert len(result.err.splitlines()) == 1, result.err
            return
        run_dir = folder / name
        assert f"--experiment-name={name}" in (run_dir / "flags.txt").read_text().replace(
            "'\"'\"'", "'"
        )
        again = run("01-single-gpu", 1, f"@{run_dir}/flags.txt")
        assert "is finished at step 1" in again.out


@pytest.mark.parametrize("flag", ["--experiment-name", "--save-dir"])
@pytest.mark.parametrize("length", [300, 5000])
def test_long_names(flag, length, tmp_path):
    flags = ("-e", "a", "--save-dir", tmp_path, f"{flag}={'x' * length}", "--max-steps", "1")
    line = line_of(run("01-single-gpu", 1, *SMALL, *flags, check=False, cwd=tmp_path))
    assert line.startswith("--save-dir ")
    assert "File name too long" in line or length == 5000  # of a long line the middle is left out
    assert len(line) < 2100


FLAG_FILES = {
    "unbalanced.txt": b"--lr 0.1 '",
    "itself.txt": b"@itself.txt",
    "binary.txt": bytes(range(256)),
    "escape.txt": b"--lr 0.1 \\",
    "surrogate.txt": b"--experiment-name \xed\xa0\x80",
    "missing.txt": b"@no-such-file.txt",
    "a-folder": None,
}


@pytest.mark.parametrize("name", FLAG_FILES)
def test_odd_files_of_flags(name, tmp_path):
    content = FLAG_FILES[name]
    path = tmp_path / name
    path.mkdir() if content is None else path.write_bytes(content)
    result = run("01-single-gpu", 1, f"@{name}", check=False, cwd=tmp_path)
    assert result.returncode == 2
    line_of(result)
    assert "Traceback" not in result.err


# The variables of torchrun.


@pytest.mark.parametrize("stage", ["01-single-gpu", "03-fsdp"])
@pytest.mark.parametrize("value", ["", "-1", "one", "1.0", "99999999999999999999", "0x1", " "])
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_odd_variables(stage, name, value):
    good = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    good |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    result = run(stage, None, "--max-steps", "1", check=False, **{**good, name: value})
    assert (
        line_of(result) == f"{name}={value!r}: must be a whole number; torchrun sets this variable"
    )
    assert "Traceback" not in result.err


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_alone_is_refused(stage):
    """Such a process would train a part of each batch, or save nothing."""
    result = run(stage, None, "--max-steps", "1", check=False, RANK="1")
    line = line_of(result)
    assert line == "RANK=1: must be below WORLD_SIZE, which is 1; torchrun sets these variables"


@pytest.mark.parametrize("stage", STAGES[1:])
def test_a_part_of_the_variables_is_refused(stage):
    result = run(stage, None, check=False, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    assert line_of(result).startswith("this stage needs torchrun: torchrun --standalone")


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    values=st.dictionaries(
        st.sampled_from(["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]),
        st.one_of(
            st.integers(-3, 3).map(str),
            st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5),
        ),
        min_size=1,
    )
)
def test_any_environment_trains_or_ends_in_a_line(values):
    """A property of stage 01, which needs none of them."""
    result = run("01-single-gpu", None, "--max-steps", "1", *SMALL, check=False, **values)
    if result.returncode != 0:
        line_of(result)
        assert "Traceback" not in result.err
    else:
        assert values.get("RANK", "0") == "0" or int(values["RANK"]) == 0

"""A newcomer's first minute: no argument, no GPU, no account, no download."""

import contextlib
import fcntl
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
from conftest import (
    ROOT,
    SMALL,
    STAGES,
    environment,
    exact,
    finish,
    fork,
    run,
    script,
    tiny_config,
)
from stages import builds_on

pytestmark = pytest.mark.law5

QUICK = [("02-ddp", 1), ("06-streaming", 1)]


def losses_of(out):
    """The losses that a run without flags has printed, and what else it must print."""
    lines = [line for line in out.splitlines() if line.startswith("step ")]
    losses = [float(line.split(" loss ")[1].split()[0]) for line in lines if " loss " in line]
    config = tiny_config()
    assert losses[0] == pytest.approx(math.log(config.vocab_size), abs=0.1)
    assert "eval/loss" in lines[-1]
    assert "eval/perplexity" in lines[-1]
    assert len(out.split("what the model writes after it:")[1].split()) > 5
    return losses


def test_the_first_steps_on_a_terminal(tmp_path):
    """On a terminal of 120 columns there is a progress bar, which shows the loss."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    process = subprocess.Popen(
        [sys.executable, script("01-single-gpu"), "--max-steps", "9", "--eval-sequences", "8"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    os.close(theirs)
    bar = b""
    with contextlib.suppress(OSError):  # which is how the end of a terminal reads
        while part := os.read(ours, 1024):
            bar += part
    result = finish(process)
    assert result.returncode == 0
    losses = losses_of(result.out)
    assert losses[-1] < losses[0] - 0.5
    assert re.search(rb"\| 9/9 \[", bar), bar
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("stage", "processes"),
    [
        pytest.param(stage, n, marks=() if (stage, n) in QUICK else pytest.mark.slow)
        for stage in STAGES[1:]
        for n in (3, 1)
        if n == 3 or (stage, n) in QUICK
    ],
)
def test_stages_run_on_any_number_of_processes(stage, processes, tmp_path):
    """From any working directory, and with few lines that are not ours. On 2 and 4 processes they
    run in the tests of law 1. torchrun may say something too, so one of them is started."""
    few = (*exact(stage, processes), *SMALL, "--max-steps", "2")
    result = run(stage, processes, *few, cwd=tmp_path, launched=stage == "05-multinode")
    assert f"8 sequences per step = {processes} share(s) × " in result.out
    foreign = [line for line in result.err.splitlines() if line.strip()]
    assert len(foreign) <= 5, foreign


def test_stage_01_under_torchrun():
    result = finish(fork(script("01-single-gpu"), 1, *SMALL, "--max-steps", "2"))
    assert result.returncode == 0, result.err
    assert "step     2/2" in result.out


def test_a_run_says_where_it_is_saved(tmp_path):
    few = (*SMALL, "--max-steps", "2")
    out = run("01-single-gpu", 1, *few, "-e", "a", "--save-dir", tmp_path).out
    assert out.splitlines()[-1] == f"the run: {tmp_path}/a"
    unnamed = run("01-single-gpu", 1, *few).out
    said = "this run is not saved: -e NAME saves it, and then the same command resumes it\nstep "
    assert said in unnamed


@pytest.mark.parametrize("stage", STAGES)
def test_help_has_a_line_for_each_flag(stage):
    result = finish(fork(script(stage), 1 if stage != "01-single-gpu" else None, "--help"))
    assert result.returncode == 0
    for flag in ("--experiment-name", "--global-batch-size", "--comet-offline", "--lr-scheduler"):
        assert flag in result.out
    assert ("--cpu-offload" in result.out) == builds_on(stage, "03-fsdp")
    assert ("--compression" in result.out) == builds_on(stage, "04-compression")
    assert ("--timeout" in result.out) == builds_on(stage, "05-multinode")
    assert ("--num-epochs" in result.out) != builds_on(stage, "06-streaming")


def test_a_command_of_a_course_of_this_family(tmp_path):
    """Its flags are spelled as users of such courses know them."""
    flags = ("-e", "old", "-d", "dummy", "-m", "tiny", "--save-dir", tmp_path, "--seed", "0")
    flags += ("--num-epochs", "1", "--lr", "3e-5", "-b", "4", "--log-freq", "1", "-s", "64")
    flags += ("--ckpt-freq", "500", "--device", "cpu", "--dtype", "fp32")
    flags += ("--comet-project-name", "p", "--comet-workspace", "w", "--max-steps", "1")
    run("01-single-gpu", 1, *flags)


def test_two_clones_do_not_mix(tmp_path):
    """The script of a second clone imports the module of its own, whatever PYTHONPATH says."""
    for name in ("one", "two"):
        folder = tmp_path / name / "01-single-gpu"
        folder.mkdir(parents=True)
        (folder / "train-llm.py").write_text(script("01-single-gpu").read_text())
        text = (ROOT / "logs_and_checkpoints.py").read_text()
        (tmp_path / name / "logs_and_checkpoints.py").write_text(
            text + f"\nprint('clone {name}')\n"
        )
    path = tmp_path / "two" / "01-single-gpu" / "train-llm.py"
    result = finish(fork(path, None, "--max-steps", "-1", PYTHONPATH=str(tmp_path / "one")))
    assert "clone two" in result.out
    assert "clone one" not in result.out

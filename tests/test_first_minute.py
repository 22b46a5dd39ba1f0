"""A newcomer's first minute: no argument, no GPU, no account, no download."""

import contextlib
import fcntl
import os
import pty
import re
import signal
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
    load,
    run,
    script,
    start,
)
from stages import builds_on

pytestmark = pytest.mark.law5

QUICK = [("02-ddp", 1)]


@pytest.mark.parametrize(
    ("flags", "last", "lines_at_least"),
    [(["--max-steps", "20"], 4.3, 3), pytest.param([], 2.3, 15, marks=pytest.mark.slow)],
)
def test_stage_01_without_an_argument(flags, last, lines_at_least, tmp_path):
    """From ln 384 to below 2.3 nats per byte, a log line every few steps, a sample of text. The
    quick set takes its first seconds."""
    process = subprocess.Popen(
        [sys.executable, script("01-single-gpu"), *flags],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    result = finish(process)
    assert result.returncode == 0, result.err
    lines = [line for line in result.out.splitlines() if line.startswith("step ")]
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines]
    assert losses[0] == pytest.approx(5.95, abs=0.1)
    assert losses[-1] < last
    assert all(later < earlier for earlier, later in zip(losses[::4], losses[4::4], strict=False))
    assert len(losses) >= lines_at_least
    assert "eval/loss" in lines[-1]
    assert "eval/perplexity" in lines[-1]
    text = result.out.split("what the model writes after it:")[1]
    assert len(text.split()) > 5
    foreign = [line for line in result.err.splitlines() if line.strip()]
    assert len(foreign) <= 5, foreign
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("stage", "processes"),
    [
        pytest.param(stage, n, marks=() if (stage, n) in QUICK else pytest.mark.slow)
        for stage in STAGES[1:]
        for n in (1, 3)
    ],
)
def test_stages_run_on_any_number_of_processes(stage, processes, tmp_path):
    """From any working directory, and with few lines that are not ours. On 2 and 4 processes they
    run in the tests of law 1. torchrun may say something too, so one of them is started."""
    few = (*exact(stage, processes), *SMALL, "--max-steps", "2")
    result = run(stage, processes, *few, cwd=tmp_path, launched=stage == "05-multinode")
    units = {"07-tensor-parallel": "tensor group(s) of 1 rank(s)"}
    units["08-pipeline-parallel"] = "pipeline(s) of 1 stage(s)"
    unit = units.get(stage, "rank(s)")
    assert f"8 sequences per step = {processes} {unit} × " in result.out
    foreign = [line for line in result.err.splitlines() if line.strip()]
    assert len(foreign) <= 5, foreign


def test_stage_01_under_torchrun():
    result = finish(start(script("01-single-gpu"), 1, *SMALL, "--max-steps", "2"))
    assert result.returncode == 0, result.err
    assert "step     2/2" in result.out


def test_the_bar_shows_the_loss():
    """On a terminal of 120 columns there is a progress bar."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    process = subprocess.Popen(
        [sys.executable, script("01-single-gpu"), *SMALL, "--max-steps", "3"],
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
    assert finish(process).returncode == 0
    assert re.search(rb"\| 3/3 \[.*loss 5\.\d", bar), bar


@pytest.fixture
def sigint():
    """A shell that starts pytest in the background has it ignore SIGINT, and so its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(process):
    """Presses Ctrl-C once the sixth step is logged, and waits for the end."""
    while not (line := process.stdout.readline()).startswith("step     6/"):
        assert line, process.communicate()
    process.send_signal(signal.SIGINT)
    result = finish(process)
    assert result.returncode != 0
    return result


def saved_step(folder):
    return int(max(folder.glob("a/step-????????")).name[5:])


ENDLESS = (*SMALL, "--max-steps", "100000", "--log-freq", "1")


@pytest.mark.usefixtures("sigint")
def test_ctrl_c_ends_in_one_line(tmp_path):
    """It says from which step the same command goes on, or how to keep the next run."""
    result = interrupt(start(script("01-single-gpu"), None, *ENDLESS))
    said = "stopped by Ctrl-C, nothing was kept: with -e NAME a run is saved, and can be resumed"
    assert result.err.splitlines()[-1] == said
    assert result.returncode == 130
    assert "Traceback" not in result.err

    named = ("-e", "a", "--save-dir", tmp_path)
    result = interrupt(start(script("01-single-gpu"), None, *ENDLESS, *named, "--ckpt-freq", "4"))
    step = saved_step(tmp_path)
    said = f"stopped by Ctrl-C, the same command goes on from step {step}"
    assert result.err.splitlines()[-1] == said
    result = run("01-single-gpu", 1, *named, "--max-steps", step + 1)
    assert f"--max-steps 100000 → {step + 1}" in result.out
    assert f"resumed from {tmp_path}/a/step-{step:08d}" in result.out


@pytest.mark.slow
@pytest.mark.usefixtures("sigint")
@pytest.mark.parametrize("stage", ["02-ddp", "05-multinode"])
def test_ctrl_c_under_torchrun(stage, tmp_path):
    """The line comes again after torchrun's traceback. Stage 05 saves first, and loses nothing."""
    named = ("-e", "a", "--save-dir", tmp_path, "--ckpt-freq", "4", *exact(stage, 2))
    result = interrupt(start(script(stage), 2, *ENDLESS, *named))
    saved = saved_step(tmp_path)
    said = f"stopped by Ctrl-C, the same command goes on from step {saved}"
    assert result.err.splitlines()[-1] == said
    assert result.err.count(said) == 2
    assert saved >= 6 if stage == "05-multinode" else saved % 4 == 0


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["02-ddp", "05-multinode"])
def test_a_mistake_is_the_last_line_under_torchrun(stage):
    result = finish(start(script(stage), 2, "--lr", "0"))
    assert result.returncode != 0
    said = "train-llm.py: error: argument --lr: 0: must be above 0 and below 2**63; "
    assert result.err.splitlines()[-1].startswith(said)
    assert result.err.count(said) == 2


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--learning-rate", "--lr"),
        ("--per_device_train_batch_size", "--batch-size"),
        ("--bach-size", "--batch-size"),
        ("--bf16", "--dtype bf16"),
    ],
)
def test_a_wrong_flag_gets_the_right_one(flag, meant):
    result = finish(fork(script("01-single-gpu"), None, flag, "3"))
    assert result.returncode == 2
    expected = f"unrecognized arguments: {flag} 3; {meant} may be meant, --help lists all flags"
    assert result.errors == [f"train-llm.py: error: {expected}"]


def test_the_last_line_says_what_there_is_now(tmp_path):
    """Where the model is, with a line that loads it, also for a run that was finished before."""
    few = (*SMALL, "--max-steps", "2")
    flags = ("-e", "a", "--save-dir", tmp_path)
    line = "to load the model: transformers.AutoModelForCausalLM.from_pretrained("
    line += f'"{tmp_path}/a/final_model")'
    assert run("01-single-gpu", 1, *few, *flags).out.splitlines()[-1] == line
    again = run("01-single-gpu", 1, *flags, "--lr", "1e-4").out
    assert again.splitlines()[-1] == line
    assert "is finished at step 2: raise --max-steps or --num-epochs, or choose another" in again
    assert "--lr 0.001 → 0.0001" in again
    unnamed = run("01-single-gpu", 1, *few).out.splitlines()[-1]
    assert (
        unnamed == "nothing was kept: with -e NAME a run is saved, and the same command resumes it"
    )


def test_the_first_line_comes_before_the_imports(tmp_path):
    """Something is on the screen while torch is imported, which takes seconds."""
    (tmp_path / "datasets.py").write_text("print('the first import', flush=True); raise SystemExit")
    result = finish(start(script("01-single-gpu"), None, PYTHONPATH=str(tmp_path)))
    first, second = result.out.splitlines()
    assert first.startswith("importing torch, transformers and datasets")
    assert second == "the first import"


@pytest.mark.parametrize("stage", STAGES)
def test_help_shows_examples_and_every_default(stage):
    """A flag has its default in its help, or a word that says what happens without it."""
    out = finish(fork(script(stage), 1 if stage != "01-single-gpu" else None, "--help")).out
    examples = load(stage).__doc__.split("\n\n")[2]
    assert examples in out
    text = " ".join(out.split())
    assert "compression" not in text or "default: int8" in text
    without = ("--help", "--experiment-name", "--dataset-subset", "--comet-offline")
    without += ("--from-scratch", "--activation-checkpointing", "--cpu-offload", "--max-steps")
    without += ("--no-reshard-after-forward",)
    for entry in out.split("\n  -")[1:]:
        flags = entry.split("\n\n")[0]
        if not any(flag in f"-{flags}" for flag in without):
            assert "default" in flags, flags


@pytest.mark.parametrize("stage", STAGES)
def test_help_has_a_line_for_each_flag(stage):
    result = finish(fork(script(stage), 1 if stage != "01-single-gpu" else None, "--help"))
    assert result.returncode == 0
    for flag in ("--experiment-name", "--global-batch-size", "--comet-offline", "--lr-scheduler"):
        assert flag in result.out
    assert ("--cpu-offload" in result.out) == builds_on(stage, "03-fsdp")
    assert ("--compression" in result.out) == builds_on(stage, "04-compression")
    assert ("--timeout" in result.out) == builds_on(stage, "05-multinode")
    assert ("--data-streams" in result.out) == builds_on(stage, "06-streaming")


def test_a_command_of_the_older_course_is_accepted(tmp_path):
    """The flags of an older three-script version of this course keep their spelling."""
    flags = ("-e", "old", "-d", "dummy", "-m", "tiny", "--save-dir", tmp_path, "--seed", "0")
    flags += ("--num-epochs", "1", "--lr", "3e-5", "-b", "4", "--log-freq", "1", "-s", "64")
    flags += ("--ckpt-freq", "500", "--device", "cpu", "--dtype", "fp32", "--dataset-subset", "x")
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
    result = finish(start(path, None, "--lr", "0", PYTHONPATH=str(tmp_path / "one")))
    assert "clone two" in result.out
    assert "clone one" not in result.out

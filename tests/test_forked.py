"""Most tests fork their runs (tests/support/forked.py). A forked run has to be as a started one."""

import pytest
from conftest import SMALL, end, finish, fork, metrics, script, start

MEASURED = ("time/", "throughput/", "memory/", "checkpoint/")


@pytest.mark.slow
def test_forked_and_started_runs_write_the_same_metrics(tmp_path):
    flags = ("-e", "a", *SMALL, "--max-steps", 4, "--log-freq", 1, "--eval-freq", 2)
    lines = []
    for number, begin in enumerate((start, fork)):
        folder = tmp_path / str(number)
        process = begin(script("03-fsdp"), 2, *flags, "--save-dir", folder)
        result = finish(process)
        assert result.returncode == 0, result.err
        lines.append(metrics(folder / "a"))
    started, forked = lines
    assert list(started) == list(forked) == [1, 2, 3, 4]
    for step in started:
        assert list(started[step]) == list(forked[step])
        same = [name for name in started[step] if not name.startswith(MEASURED)]
        assert {"train/loss", "train/grad_norm", "train/learning_rate"} <= set(same)
        assert [started[step][name] for name in same] == [forked[step][name] for name in same]


@pytest.mark.parametrize("processes", [None, 2])
@pytest.mark.parametrize(
    ("last_line", "alone"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit('a message')", 1),
        ("raise ValueError('a mistake')", 1),
        ("os.kill(os.getpid(), 9)", -9),
    ],
)
def test_exit_codes(processes, last_line, alone, tmp_path):
    """torchrun's is 1 when a rank fails. Here that is rank 0, and the other one sleeps: it is
    ended, so nothing is left of a run."""
    path = tmp_path / "end.py"
    sleep = "if os.environ.get('RANK') == '1' and 'exit(0)' not in open(__file__).read()[9:]:"
    path.write_text(f"import os, sys, time\n{sleep}\n    time.sleep(3600)\n{last_line}\n")
    process = fork(path, processes)
    result = finish(process)
    assert result.returncode == (alone if processes is None else min(abs(alone), 1))
    assert ("a message" in result.err) == ("a message" in last_line)
    assert ("ValueError: a mistake" in result.err) == ("a mistake" in last_line)
    end(process)

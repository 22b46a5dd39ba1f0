"""Most tests fork their runs (tests/support/forked.py). A forked run has to be as a started one."""

import json
import signal
import time

import forked
import psutil
import pytest
from conftest import SMALL, end, environment, finish, fork, metrics, script, start

WAYS = {"started": start, "forked": fork}
# What two runs of the same script measure anew, and what torchrun names anew for each job.
MEASURED = ("time/", "throughput/", "memory/", "checkpoint/")
NAMED_ANEW = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
# For NCCL, for files of errors and for metrics of torchrun, none of which a forked run has.
OF_TORCHRUN = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHELASTIC_ERROR_FILE", "PET_")
OF_TORCHRUN += ("TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")

REPORT = """
import json, os, sys
sys.stdout.write(json.dumps({
    "argv": sys.argv, "cwd": os.getcwd(), "environment": dict(os.environ), "name": __name__,
    "path": sys.path, "own session": os.getsid(0) == os.getpid(),
}).replace("\\n", "") + "\\n")
sys.stderr.write("to the other stream\\n")
"""


@pytest.mark.slow
def test_forked_and_started_runs_write_the_same_metrics(tmp_path):
    stage, processes = "03-fsdp", 2
    flags = ("-e", "a", *SMALL, "--max-steps", 4, "--log-freq", 1, "--eval-freq", 2)
    lines = {}
    for way, begin in WAYS.items():
        folder = tmp_path / way
        process = begin(script(stage), processes, *flags, "--save-dir", folder)
        result = finish(process)
        assert result.returncode == 0, result.err
        assert isinstance(process, forked.ForkedRun) == (way == "forked")
        lines[way] = metrics(folder / "a")
    assert list(lines["started"]) == [1, 2, 3, 4]
    for step, started in lines["started"].items():
        other = lines["forked"][step]
        assert list(other) == list(started)
        same = [name for name in started if not name.startswith(MEASURED)]
        assert {"train/loss", "train/grad_norm", "train/learning_rate"} <= set(same)
        assert {name: other[name] for name in same} == {name: started[name] for name in same}


@pytest.mark.parametrize("processes", [None, 2])
def test_a_script_finds_the_same(processes, tmp_path):
    """Arguments, environment, working directory, path and streams."""
    path = tmp_path / "report.py"
    path.write_text(REPORT)
    reports = {}
    for way, begin in WAYS.items():
        result = finish(begin(path, processes, "--one", 2, cwd=tmp_path, PROBE="a b"))
        assert result.returncode == 0, result.err
        assert result.err.count("to the other stream\n") == (processes or 1)
        found = [json.loads(line) for line in result.out.splitlines()]
        for report in found:
            variables = report["environment"]
            for name in list(variables):
                if name.startswith(OF_TORCHRUN):
                    del variables[name]
                elif name in NAMED_ANEW:
                    variables[name] = "another"
        reports[way] = sorted(found, key=lambda report: report["environment"].get("RANK", "0"))
    assert reports["forked"] == reports["started"]
    assert len(reports["forked"]) == (processes or 1)
    assert reports["forked"][0]["environment"]["PROBE"] == "a b"


@pytest.mark.parametrize("processes", [None, 2])
@pytest.mark.parametrize(
    ("last_line", "alone"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(7)", 7),
        ("sys.exit('a message')", 1),
        ("raise ValueError('a mistake')", 1),
        ("os.kill(os.getpid(), 9)", -9),
    ],
)
def test_exit_codes(processes, last_line, alone, tmp_path):
    """torchrun's is 1 when a rank fails. Here that is rank 0, and the other one sleeps."""
    path = tmp_path / "end.py"
    sleep = "if os.environ.get('RANK') == '1' and 'exit(0)' not in open(__file__).read()[9:]:"
    path.write_text(f"import os, sys, time\n{sleep}\n    time.sleep(3600)\n{last_line}\n")
    result = finish(fork(path, processes))
    assert result.returncode == (alone if processes is None else min(abs(alone), 1))
    assert ("a message" in result.err) == ("a message" in last_line)
    assert ("ValueError: a mistake" in result.err) == ("a mistake" in last_line)


def test_a_forked_run_ends_with_all_that_it_started(tmp_path):
    path = tmp_path / "sleep.py"
    path.write_text(
        f"import os, time\nopen(f'{tmp_path}/' + os.environ['RANK'], 'w')\ntime.sleep(3600)"
    )
    process = fork(path, 2)
    limit = time.monotonic() + 300
    while not all((tmp_path / rank).exists() for rank in "01") and time.monotonic() < limit:
        time.sleep(0.05)
    ranks = psutil.Process(process.pid).children()
    assert len(ranks) == 2
    assert process.poll() is None
    end(process)
    assert process.returncode == -signal.SIGKILL
    assert not any(rank.is_running() for rank in ranks)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_not_lost(number, tmp_path):
    """Neither at once nor while the ranks are forked, also if a shell has the server ignore it."""
    path = tmp_path / "sleep.py"
    path.write_text("import time\ntime.sleep(3600)")
    for seconds in (0, 0.02, 0.1):
        process = fork(path, 2)
        time.sleep(seconds)
        process.send_signal(number)
        assert finish(process, timeout=300).returncode != 0
        end(process)


def test_what_is_read_at_import_is_not_forked(tmp_path):
    path = tmp_path / "print.py"
    path.write_text("import os\nprint(os.environ['HF_HOME'])")
    assert forked.can_fork(environment(PROBE="1", PYTHONPATH="/nowhere"))
    assert not forked.can_fork(environment(OMP_NUM_THREADS="2"))
    process = fork(path, None, HF_HOME="/elsewhere")
    assert not isinstance(process, forked.ForkedRun)
    assert finish(process).out == "/elsewhere\n"

"""Nodes of a job on this machine: run.sh, torchrun and workers, as on machines of their own."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, SMALL, TIMEOUT, assert_same_curve, end, environment, metrics

RUN = ROOT / "05-multinode" / "run.sh"
INTERVAL = 20
ALONE = (*SMALL, "--log-freq", "1", "--dtype", "fp32", "--lr-scheduler", "constant")
ALONE += ("--warmup-steps", "5", "--seed", "3", "--ckpt-freq", INTERVAL, "--num-epochs", 9999)
FLAGS = (*ALONE, "--compression", "none", "--timeout", "60")


def launcher_environment(**more):
    """That of a run, in which `python` is the one of these tests, also in one not activated."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return environment(PATH=path, **more)


def free_port():
    with socket.socket() as one:
        one.bind(("", 0))
        return one.getsockname()[1]


class Node:
    """A node that was started with flags, by the command `prefix`; what it prints is in `log`."""

    def __init__(self, log, variables, flags, prefix=()):
        self.log = Path(log)
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [*prefix, "bash", str(RUN), *map(str, flags)],
                env=launcher_environment(TORCH_CPP_LOG_LEVEL="ERROR", **variables),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def workers(self):
        """The processes that train: those of train-llm.py that torchrun started."""
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.process.pid).children()
            return [p for p in family if p.is_running() and "train-llm.py" in " ".join(p.cmdline())]
        return []

    def said(self):
        return self.log.read_text(errors="replace")

    def signal(self, number):
        self.process.send_signal(number)

    def wait(self, timeout=TIMEOUT):
        """The exit code."""
        return self.process.wait(timeout)

    def kill(self):
        """As if the machine lost its power: agent, workers and a store that it keeps."""
        end(self.process)


@contextmanager
def paused(nodes):
    """The workers stand still, so that no number of steps depends on the speed of this machine."""
    workers = [worker for node in nodes for worker in node.workers()]
    for worker in workers:
        worker.suspend()
    try:
        yield
    finally:
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.resume()


@contextmanager
def job(folder, processes=1, store="127.0.0.1", **more):
    """Yields a function that starts a node of a new job, with a name and flags. The first one is at
    the address of the store, and serves it if that is not outside of the job. What the nodes said
    is printed if the test fails."""
    variables = {"MASTER_ADDR": store, "MASTER_PORT": str(free_port()), "NNODES": "1:4"}
    variables |= {"NPROC_PER_NODE": str(processes), "LAST_CALL": "3", "RDZV_ID": "a"}
    # All are at 127.0.0.1. Those that do not serve the store say that they are elsewhere.
    variables |= {"GLOO_SOCKET_IFNAME": "lo"} | more
    nodes = []

    def start(name, *flags, **others):
        number = len(nodes) + 1
        own = variables | {"LOCAL_ADDR": f"127.0.0.{number}"} | others
        nodes.append(Node(folder / f"{name}.log", own, flags))
        return nodes[-1]

    start.variables = variables
    try:
        yield start
    except BaseException:
        for node in nodes:
            print(f"{node.log}, exit code {node.process.poll()}:\n{node.said()}")
        raise
    finally:
        for node in nodes:
            node.kill()


def wait_until(condition, what, nodes=()):
    """Generous: these machines are slow at times. A node that ended cannot bring it about."""
    limit = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < limit, f"not within {TIMEOUT} s: {what}"
        logs = "".join(node.said() for node in nodes)
        assert not nodes or any(node.process.poll() is None for node in nodes), logs
        time.sleep(0.1)


def join(start, *nodes):
    """Starts a node. The others stand still until they have noticed it."""
    before = [node.said().count("closing signal SIGTERM") for node in nodes]

    def noticed():
        return before != [node.said().count("closing signal SIGTERM") for node in nodes]

    with paused(nodes):
        new = start()
        wait_until(noticed, "notice of a join", nodes)
    return new


def last_line(run_dir):
    """The last whole line of a run's metrics. The lines of a step that is repeated are cut off when
    the run is resumed."""
    path = Path(run_dir, "metrics.jsonl")
    lines = [x for x in path.read_text().splitlines() if x.endswith("}")] if path.exists() else []
    return json.loads(lines[-1]) if lines else {}


def last_step(run_dir):
    """The number of the last step that the run has logged."""
    return last_line(run_dir).get("step", 0)


def world_size(run_dir):
    """The world size of the last step logged, 0 before the first."""
    return last_line(run_dir).get("elastic/world_size", 0)


def restarts(*nodes):
    """What was said of each restart: its number, the new world size, the steps repeated."""
    pattern = r"restart (\d+): (\d+) processes, (\d+) steps are repeated"
    return sorted({tuple(map(int, m)) for node in nodes for m in re.findall(pattern, node.said())})


def named(folder, steps=100000):
    """Flags of a run in `folder`/a, by default one that the test stops by SIGTERM at its end."""
    return ("-e", "a", "--save-dir", folder, *FLAGS, "--max-steps", steps)


def assert_the_curve(folder, curve):
    """The curve of the run on one process, which nothing interrupts: its first 1000 steps."""
    seen = metrics(folder / "a")
    steps = sorted(seen)
    assert steps == list(range(1, steps[-1] + 1))
    length = min(length for length in (20, 100, 250, 1000) if length >= min(steps[-1], 1000))
    whole = curve("01-single-gpu", 1, *ALONE, "--max-steps", length)
    assert_same_curve(whole, seen, [step for step in steps if step <= 200], rel_norm=1e-3)
    # Rounding differences grow with the steps. Another batch is far beyond them.
    for step in steps[:length]:
        assert seen[step]["train/loss"] == pytest.approx(whole[step]["train/loss"], rel=3e-2), step

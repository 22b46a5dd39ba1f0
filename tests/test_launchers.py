"""Stage 05 on real launchers: Slurm, and submitit."""

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
from conftest import ROOT, assert_same_curve, environment, metrics
from nodes import (
    ALONE,
    assert_the_curve,
    last_step,
    named,
    wait_until,
    world_size,
)
from slurm_cluster import SlurmMissing, cluster, processes_of

pytestmark = [pytest.mark.slow, pytest.mark.law4]


class Job:
    """A job of train-llm.sbatch, named a, on a Slurm of two nodes."""

    def __init__(self, folder, variables, steps):
        self.variables = variables | {"NPROC_PER_NODE": "1"}
        for name in [name for name in variables if name.startswith(("COMET", "MASTER_"))]:
            del self.variables[name]
        self.variables |= {"LAST_CALL": "10", "HF_HOME": os.environ["COURSE_HF_HOME"]}
        self.variables |= {"OMP_NUM_THREADS": "1"}
        flags = named(folder, steps)[2:]  # the name is that of the job
        output = f"--output={folder}/job.log"
        submit = ["sbatch", "--parsable", "--job-name=a", output, "train-llm.sbatch", *flags]
        self.folder, self.id = folder, self.slurm(*submit).strip()

    def slurm(self, *command):
        """What a command of Slurm prints."""
        done = subprocess.run(
            [str(word) for word in command],
            env=self.variables,
            cwd=ROOT / "05-multinode",
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def state(self):
        return self.slurm("scontrol", "show", "job", self.id).split("JobState=")[1].split()[0]

    def advance(self, steps):
        goal = last_step(self.folder / "a") + steps
        wait_until(lambda: last_step(self.folder / "a") >= goal, f"step {goal} of the job")

    def logs(self):
        return "".join(path.read_text() for path in self.folder.glob("**/*.log"))

    def processes(self, word, value):
        """Process ids of the cluster with a word on their command line and of that environment."""
        found = []
        for process in processes_of(Path(self.variables["SLURM_CONF"]).parent):
            with suppress(OSError):
                line = Path(f"/proc/{process}/cmdline").read_bytes()
                variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
                if word.encode() in line and value.encode() in b"\0".join(variables):
                    found.append(process)
        return found


@pytest.fixture
def slurm(tmp_path):
    """A function that submits a job of so many steps."""
    with ExitStack() as stack:
        try:
            # Both nodes are this machine. Slurm gives each task the address of another host.
            prolog = tmp_path / "prolog.sh"
            prolog.write_text('#!/bin/sh\necho "export LOCAL_ADDR=127.0.0.${SLURMD_NODENAME#n}"\n')
            prolog.chmod(0o755)
            # The port of a job depends on its number. Another test may have a cluster of its own.
            settings = {"TaskProlog": prolog, "FirstJobId": 1 + os.getpid() % 9000}
            variables = stack.enter_context(cluster(**settings))
        except SlurmMissing as missing:
            pytest.skip(str(missing))
        yield partial(Job, tmp_path, variables)


def test_slurm_requeues_a_run_until_it_is_finished(slurm, curve, tmp_path):
    """Two nodes. A requeue and a warning before the time limit: no step is lost, and the run goes
    on by itself. Its end is the job's."""
    steps = 100
    job = slurm(steps)
    job.advance(10)
    job.slurm("scontrol", "requeue", job.id)
    job.advance(10)
    job.slurm("scancel", "--batch", "--signal=USR1", job.id)
    ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
    wait_until(lambda: job.state() in ended, "the end of the job")
    assert job.state() == "COMPLETED", job.logs()
    assert not job.processes("train-llm", "SLURM_JOB_ID")
    assert_the_curve(tmp_path, curve)
    line = metrics(tmp_path / "a")[steps]
    assert (line["elastic/restarts"], line["elastic/steps_lost"]) == (2, 0)
    assert (tmp_path / "a" / "final_model").exists()


def test_slurm_loses_a_node(slurm, curve, tmp_path):
    """Not that of the batch script. The other goes on in the same job."""
    job = slurm(100000)
    wait_until(lambda: world_size(tmp_path / "a") == 2, "both nodes")
    job.advance(20)
    lost = job.processes("slurmd", "SLURM_CONF")
    lost = [p for p in lost if b"n2" in Path(f"/proc/{p}/cmdline").read_bytes().split(b"\0")]
    lost += job.processes("", "SLURMD_NODENAME=n2")
    assert len(lost) > 2
    for process in lost:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    job.slurm("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=lost")
    wait_until(lambda: world_size(tmp_path / "a") == 1, "one node")
    job.advance(20)
    assert job.state() == "RUNNING", job.logs()
    job.slurm("scancel", job.id)
    wait_until(lambda: job.state() == "CANCELLED", "the end of the job")
    wait_until(lambda: not job.processes("train-llm", "SLURM_JOB_ID"), "the end of its processes")
    assert (tmp_path / "a" / f"step-{last_step(tmp_path / 'a'):08d}").exists()
    assert_the_curve(tmp_path, curve)


def test_more_than_one_node_needs_an_address():
    run = ["bash", str(ROOT / "05-multinode" / "run.sh")]
    done = subprocess.run(run, env=environment(NNODES="2"), capture_output=True, text=True)
    assert done.returncode != 0
    assert "MASTER_ADDR: the address of the node that serves the store" in done.stderr


@contextmanager
def names_of_nodes():
    """The names of the cluster's nodes stand for this machine, as submitit looks them up."""
    hosts, line = Path("/etc/hosts"), f"127.0.0.1 n1 n2  # pytest {os.getpid()}\n"
    if os.geteuid() != 0:
        pytest.skip("the names of nodes in /etc/hosts need root")
    hosts.write_text(hosts.read_text() + line)
    try:
        yield
    finally:
        hosts.write_text(hosts.read_text().replace(line, ""))


def test_submit_sends_a_job_for_each_combination(tmp_path, curve):
    """Two learning rates on two nodes each. One job is preempted: Slurm's signal reaches submitit,
    which stops the run, and queues the job again. Both curves are those of one process."""
    pytest.importorskip("submitit", reason="needs submitit: pip install -e '.[slurm]'")
    with names_of_nodes(), ExitStack() as stack:
        try:
            variables = stack.enter_context(cluster())
        except SlurmMissing as missing:
            pytest.skip(str(missing))
        names = [name for name in variables if name.startswith(("COMET", "MASTER_", "TORCHEL"))]
        variables = {k: v for k, v in variables.items() if k not in names}
        variables |= {"HF_HOME": os.environ["COURSE_HF_HOME"], "OMP_NUM_THREADS": "1"}
        folder = ROOT / "05-multinode"
        command = [sys.executable, folder / "submit.py", folder / "train-llm.py", "-e", "a"]
        command += ["--nodes", 2, "--logs", tmp_path / "logs", "--save-dir", tmp_path]
        command += [*ALONE, "--compression", "none", "--max-steps", 100, "--lr", "1e-3,5e-4"]
        done = subprocess.run(
            [str(w) for w in command], env=variables, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        jobs = re.findall(r"job (\d+): (\S+)", done.stdout)
        assert [name for _, name in jobs] == ["a-1e-3", "a-5e-4"]

        def slurm(*words):
            return subprocess.run(words, env=variables, capture_output=True, text=True).stdout

        def logs():
            return "".join(path.read_text() for path in (tmp_path / "logs").glob("*_log.*"))

        wait_until(lambda: last_step(tmp_path / "a-1e-3") >= 10, "10 steps")
        slurm("scancel", "--signal=USR2", jobs[0][0])

        def completed():
            states = [slurm("scontrol", "show", "job", job) for job, _ in jobs]
            return all("JobState=COMPLETED" in state for state in states)

        wait_until(completed, "the end of both jobs")
        assert "resumed from" in logs()
    for (_, name), lr in zip(jobs, ("1e-3", "5e-4"), strict=True):
        whole = curve("01-single-gpu", 1, *ALONE, "--max-steps", 100, "--lr", lr)
        seen = metrics(tmp_path / name)
        assert list(seen) == list(range(1, 101))
        assert_same_curve(whole, seen, seen, rel_norm=1e-3)
        assert seen[100]["elastic/world_size"] == 2
    assert (seen[100]["elastic/restarts"], seen[100]["elastic/steps_lost"]) == (0, 0)
    preempted = metrics(tmp_path / "a-1e-3")[100]
    assert (preempted["elastic/restarts"], preempted["elastic/steps_lost"]) == (1, 0)

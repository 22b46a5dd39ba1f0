"""Stage 05 on real launchers: Slurm, and submitit."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from conftest import ROOT, assert_same_curve, environment, metrics
from nodes import (
    ALONE,
    RUN,
    assert_the_curve,
    free_port,
    job,
    last_step,
    launcher_environment,
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
        self.variables |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": environment()["PYTHONPATH"]}
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


def launch(*command, **variables):
    return subprocess.run(
        [str(word) for word in command],
        env=launcher_environment(**variables),
        capture_output=True,
        text=True,
    )


def test_more_than_one_node_needs_an_address():
    done = launch("bash", RUN, NNODES="2")
    assert done.returncode != 0
    assert "MASTER_ADDR: the address of the node that serves the store" in done.stderr


@pytest.fixture
def debian(tmp_path):
    """The beginning of a command line. What follows runs where the host's name, debian, is
    127.0.1.1, as in the /etc/hosts that Debian installs."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 debian\n")
    mount = 'mount --bind "$0" /etc/hosts && exec "$@"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, hosts]
    if not shutil.which("unshare") or launch(*command, "true").returncode != 0:
        pytest.skip("an /etc/hosts of its own needs namespaces for users and mounts")
    return command


def test_the_name_of_the_store_must_not_be_loopback_on_its_node(debian):
    """No other node could reach it, and all would wait."""
    done = launch(*debian, "bash", RUN, NNODES="1:2", MASTER_ADDR="debian", NPROC_PER_NODE="1")
    assert done.returncode != 0
    [line] = (done.stdout + done.stderr).splitlines()
    assert line.startswith("run.sh: MASTER_ADDR=debian is 127.0.1.1 on this machine")
    assert "Set MASTER_ADDR to an IP address that they reach" in line


@pytest.mark.parametrize("address", ["debian", "127.0.0.1", "localhost"])
def test_a_batch_job_knows_the_same_before_it_starts_the_nodes(debian, address, tmp_path):
    programs = {
        "scontrol": f"echo '   NodeAddr={address} NodeHostName=debian Version=24.05'",
        "srun": f"touch {tmp_path}/started",
    }
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    command = [*debian, "env", f"PATH={tmp_path}:{os.environ['PATH']}", "bash"]
    slurm = {"JOB_ID": "1", "JOB_NAME": "a", "NNODES": "2"}
    variables = {f"SLURM_{name}": value for name, value in slurm.items()}
    batch = RUN.parent / "train-llm.sbatch"
    done = launch(*command, batch, SLURMD_NODENAME="debian", **variables)
    assert (tmp_path / "started").exists() == (address != "debian")
    if address == "debian":
        assert done.returncode != 0
        [line] = (done.stdout + done.stderr).splitlines()
        assert line.startswith("train-llm.sbatch: MASTER_ADDR=debian is 127.0.1.1 on this node")
        assert "set it to an IP address that they reach" in line
    else:
        assert (done.returncode, done.stderr) == (0, "")
        (tmp_path / "started").unlink()
        done = launch(*command, batch, SLURM_ARRAY_JOB_ID="1", **variables)
        assert not (tmp_path / "started").exists() and done.returncode == 1
        assert done.stderr.startswith("train-llm.sbatch: a job array is not possible; submit.py")


NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS")


def variables_of_workers(folder, **more):
    """What run.sh sets of NAMES for the workers of a node."""
    script = folder / "variables.py"
    # A single write, as `print` writes a text and its line break apart, and others come in between.
    line = f'f"{{[os.environ.get(name) for name in {NAMES}]}}\\n"'
    script.write_text(f"import os\nos.write(1, {line}.encode())\n")
    given = {"MASTER_PORT": str(free_port()), "LAST_CALL": "1", "NNODES": "1:2"} | more
    command = ["env", *(f"--unset={name}" for name in NAMES if name not in more), "bash", RUN]
    done = launch(*command, SCRIPT=str(script), MASTER_ADDR="127.0.0.1", **given)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_workers_get_an_interface_and_their_share_of_the_cores(tmp_path):
    """The interface is that of the way to the store. No worker is left without a thread."""
    cores = len(os.sched_getaffinity(0))
    threads = str(max(1, cores // 2))
    assert variables_of_workers(tmp_path, NPROC_PER_NODE="2") == [str(["lo", "=lo", threads])] * 2
    one = {"NPROC_PER_NODE": "1", "GLOO_SOCKET_IFNAME": "a", "NCCL_SOCKET_IFNAME": "b"}
    assert variables_of_workers(tmp_path, **one) == [str(["a", "b", str(cores)])]
    one = {"NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "7"}
    assert variables_of_workers(tmp_path, **one) == [str(["lo", "=lo", "7"])]
    if not torch.cuda.is_available():  # a word of torchrun: a worker for each GPU, at least one
        assert len(variables_of_workers(tmp_path, NPROC_PER_NODE="gpu")) == 1
    many = variables_of_workers(tmp_path, NPROC_PER_NODE=str(cores + 1), NNODES="1")
    assert many == [str([None, None, "1"])] * (cores + 1)


def test_a_port_that_another_program_uses():
    """It may be another run.sh. Where the store of this job is, nothing but one line is said."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        more = {"NNODES": "1:2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        done = launch("bash", RUN, NPROC_PER_NODE="1", **more)
    assert done.returncode != 0
    line = f"run.sh: MASTER_ADDR=127.0.0.1, MASTER_PORT={port}: Address already in use\n"
    assert done.stdout + done.stderr == line


def test_a_port_whose_last_connections_were_just_closed(tmp_path):
    """As after a requeue. The system keeps them for a minute, and the port can be used."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            server.accept()[0].close()  # the side that closes first
    with socket.socket() as strict, pytest.raises(OSError, match="in use"):
        strict.bind(("", port))
    more = {"NPROC_PER_NODE": "1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    assert variables_of_workers(tmp_path, **more) == [str(["lo", "=lo", "1"])]


def test_ctrl_c_saves_as_sigterm_does(curve, tmp_path):
    """A terminal sends SIGINT to run.sh, whose workers are in sessions of their own."""
    with job(tmp_path, processes=2, NNODES="1") as start:
        node = start("a", *named(tmp_path))
        wait_until(lambda: last_step(tmp_path / "a") >= 5, "5 steps", [node])
        before = len(node.said().splitlines())
        os.killpg(node.process.pid, signal.SIGINT)
        assert node.wait() != 0
        step = last_step(tmp_path / "a")
        lines = [x for x in node.said().splitlines()[before:] if not x.startswith("step ")]
        assert f"stopped by SIGTERM after step {step}" in lines
        assert len(lines) < 10 and not any("Traceback" in line for line in lines)
        assert (tmp_path / "a" / f"step-{step:08d}").exists()
    assert_the_curve(tmp_path, curve)


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
            variables = stack.enter_context(cluster(FirstJobId=1 + os.getpid() % 9000))
        except SlurmMissing as missing:
            pytest.skip(str(missing))
        names = [name for name in variables if name.startswith(("COMET", "MASTER_", "TORCHEL"))]
        variables = {k: v for k, v in variables.items() if k not in names}
        variables |= {"HF_HOME": os.environ["COURSE_HF_HOME"], "OMP_NUM_THREADS": "1"}
        variables["PYTHONPATH"] = environment()["PYTHONPATH"]
        folder = ROOT / "05-multinode"
        command = [sys.executable, folder / "submit.py", folder / "train-llm.py", "-e", "a"]
        command += ["--nodes", 2, "--logs", tmp_path / "logs", "--save-dir", tmp_path]
        command += [*ALONE, "--compression", "none", "--max-steps", 100, "--lr", "1e-3,5e-4"]
        done = subprocess.run(
            [str(w) for w in command], env=variables, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        jobs = re.findall(r"job (\d+): (\S+)", done.stdout)
        # Two minutes after one process has failed, Slurm ends the others.
        scripts = [path.read_text() for path in (tmp_path / "logs").glob("*_submission.sh")]
        assert scripts and all(re.search("^srun .* --wait=120 ", x, re.M) for x in scripts)
        assert [name for _, name in jobs] == ["a-1e-3", "a-5e-4"]

        def slurm(*words):
            return subprocess.run(words, env=variables, capture_output=True, text=True).stdout

        def logs():
            return "".join(path.read_text() for path in (tmp_path / "logs").glob("*_log.*"))

        @stack.callback
        def print_state():  # shown by pytest if the test fails
            print(logs(), *(slurm("scontrol", "show", "job", job) for job, _ in jobs))

        wait_until(lambda: last_step(tmp_path / "a-1e-3") >= 10, "10 steps")
        seen = set()
        for process in processes_of(Path(variables["SLURM_CONF"]).parent):
            with suppress(psutil.NoSuchProcess):
                if "a-1e-3" in psutil.Process(process).cmdline():  # what submitit has started
                    names = psutil.Process(process).environ()
                    seen.add((names.get("GLOO_SOCKET_IFNAME"), names.get("NCCL_SOCKET_IFNAME")))
        assert seen == {("lo", "=lo")}
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

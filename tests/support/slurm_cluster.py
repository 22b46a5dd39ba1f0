"""A real Slurm of two nodes on this machine, for tests.

    with cluster() as environment:
        subprocess.run(["sbatch", "train-llm.sbatch"], env=environment, check=True)

It has a folder and ports of its own: the machine's Slurm, if it has one, is neither used nor
touched, and several clusters can run side by side.
"""

import contextlib
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROGRAMS = ["munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "srun"]
NODES = ["n1", "n2"]


class SlurmMissing(RuntimeError):
    """Slurm or munge is not installed: tests skip on it."""


def programs_environment():
    """This environment, with this Python and Slurm's programs on the PATH, without variables of an
    outer Slurm."""
    prefixes = ("SLURM", "SBATCH_", "SRUN_", "SQUEUE_", "SCANCEL_", "SCONTROL_", "SINFO_", "MUNGE_")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(prefixes)
    }
    python = Path(sys.executable).parent
    environment["PATH"] = f"{python}:{environment['PATH']}:/usr/sbin:/usr/local/sbin:/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=environment["PATH"]) is None]
    if missing:
        names = ", ".join(missing)
        raise SlurmMissing(f"not installed: {names} (Debian: apt-get install slurm-wlm munge)")
    return environment


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]


def write_configuration(folder, environment, settings):
    """Writes slurm.conf and cgroup.conf for fresh ports, and empties the daemons' folders."""
    for name in ["state", *(f"spool.{node}" for node in NODES)]:
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
    controller_port, *node_ports = free_ports(1 + len(NODES))
    user = pwd.getpwuid(os.geteuid()).pw_name
    host = socket.gethostname().split(".")[0]
    values = {
        "ClusterName": "test",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": controller_port,
        "SlurmUser": user,
        "SlurmdUser": user,
        # Seconds for which a requeued job is held back (120). A job fails if this machine takes
        # longer to start its processes, or longer than the timeout of a message (10).
        "AuthInfo": f"socket={folder}/munge.socket,cred_expire=60",
        "MessageTimeout": 60,
        "StateSaveLocation": f"{folder}/state",
        "SlurmdSpoolDir": f"{folder}/spool.%n",
        "SlurmctldPidFile": f"{folder}/slurmctld.pid",
        "SlurmdPidFile": f"{folder}/slurmd.%n.pid",
        "PlugStackConfig": f"{folder}/plugstack.conf",
        # The default needs cgroups. No other default does, and none needs a database.
        "ProctrackType": "proctrack/linuxproc",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "SlurmdParameters": "config_overrides",  # trust CPUs= and RealMemory= below
        "ReturnToService": 2,
        # Short intervals.
        "SchedulerParameters": "sched_interval=1,sched_min_interval=1,batch_sched_delay=0,"
        "bf_interval=1",
        # Seconds for which `scontrol show job` knows a job that has ended (300).
        "MinJobAge": 3600,
    }
    lines = [f"{name}={value}" for name, value in (values | settings).items()]
    for node, port in zip(NODES, node_ports, strict=True):
        place = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
        lines.append(f"NodeName={node} {place} CPUs=8 RealMemory=8000 State=UNKNOWN")
    nodes = ",".join(NODES)
    lines.append(f"PartitionName=main Nodes={nodes} Default=YES MaxTime=INFINITE DefaultTime=10")
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    (folder / "plugstack.conf").write_text("")
    version = output(["slurmctld", "-V"], environment)
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    # Older ones read no cgroup.conf where no plugin of theirs uses cgroups.
    (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n" if numbers >= (23, 2) else "")


def wait_until(condition, seconds, processes=()):
    """Whether `condition` became true in `seconds`, with all `processes` alive."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if any(process.poll() is not None for process in processes):
            return False
        if condition():
            return True
        time.sleep(0.1)
    return False


def output(command, environment):
    """What a command of Slurm printed, or '' where it failed."""
    how = {"env": environment, "capture_output": True, "text": True, "timeout": 30}
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(command, **how)
        return done.stdout if done.returncode == 0 else ""
    return ""


def processes_of(folder):
    """All processes of this cluster, known by their environment: daemons, jobs, clients."""
    marker = f"SLURM_CONF={folder}/slurm.conf".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if marker in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def end_all(folder, environment):
    """Ends all jobs, then the daemons and what is left: SIGTERM, a second later SIGKILL."""
    user = pwd.getpwuid(os.geteuid()).pw_name
    if output(["squeue", "--noheader", "--format=%A"], environment):
        output(["scancel", "--quiet", f"--user={user}"], environment)
        wait_until(lambda: not output(["squeue", "--noheader", "--format=%A"], environment), 5)
    begin = time.monotonic()
    while (left := processes_of(folder)) and time.monotonic() < begin + 10:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM if time.monotonic() < begin + 1 else signal.SIGKILL)
        time.sleep(0.1)


@contextlib.contextmanager
def cluster(**settings):
    """Yields the environment in which the commands of a running Slurm work. `settings` are lines of
    slurm.conf. Raises SlurmMissing where Slurm or munge is not installed."""
    environment = programs_environment()
    # Not below the folder of a test: paths of unix sockets have at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    environment["SLURM_CONF"] = f"{folder}/slurm.conf"
    daemons = []

    def start(name, *options):
        """Starts a daemon that gets SIGTERM when this thread ends, even by SIGKILL."""
        command = [shutil.which(name, path=environment["PATH"]), *options]
        if shutil.which("setpriv"):
            command = ["setpriv", "--pdeathsig", "TERM", *command]
        with open(folder / f"{name}.log", "ab") as out:
            how = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
            how |= {"env": environment, "cwd": "/", "start_new_session": True}
            daemons.append(subprocess.Popen(command, **how))

    def all_idle():
        states = output(["sinfo", "--noheader", "--Node", "--format=%T"], environment)
        return states.split() == ["idle"] * len(NODES)

    try:
        (folder / "munge.key").touch(mode=0o600)
        (folder / "munge.key").write_bytes(os.urandom(128))
        names = {"socket": "socket", "key-file": "key", "log-file": "log", "pid-file": "pid"}
        names |= {"seed-file": "seed"}
        options = [f"--{option}={folder}/munge.{name}" for option, name in names.items()]
        start("munged", "--foreground", "--force", *options)
        wait_until((folder / "munge.socket").exists, 60, daemons)
        for _ in range(3):  # another process may have taken one of the free ports meanwhile
            write_configuration(folder, environment, settings)
            start("slurmctld", "-D")
            for node in NODES:
                start("slurmd", "-D", "-N", node)
            if wait_until(all_idle, 60, daemons):
                break
            for daemon in daemons[1:]:
                daemon.kill()
                daemon.wait()
            del daemons[1:]
        else:
            logs = "".join(log.read_text(errors="replace")[-2000:] for log in folder.glob("*.log"))
            raise RuntimeError(f"Slurm did not start:\n{logs}")
        yield environment
    finally:
        end_all(folder, environment)
        for daemon in daemons:
            daemon.wait()
        shutil.rmtree(folder)

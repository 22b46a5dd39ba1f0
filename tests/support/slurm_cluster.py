"""Start a real Slurm of two nodes on this one machine, for tests.

    with cluster(folder) as environment:
        subprocess.run(['sbatch', 'train-llm.sbatch'], env=environment, check=True)

Everything is under `folder`, on free ports: the machine's own Slurm, if it has one, is neither
used nor touched, and several clusters can run side by side.
"""

import contextlib
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

PROGRAMS = ["munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "srun"]
NODES = ["n1", "n2"]


class SlurmMissing(RuntimeError):
    """Slurm or munge is not installed: tests skip on it."""


class SlurmFailed(RuntimeError):
    """Slurm is installed, but the cluster did not start."""


def default_settings():
    """Lines of slurm.conf that a test may replace: short intervals, not the defaults."""
    return {
        # Seconds for which a requeued job is held back (120). Less than 5 acts as 120.
        "cred_expire": 5,
        "SchedulerParameters": "sched_interval=1,sched_min_interval=1,batch_sched_delay=0,"
        "bf_interval=1",
        # Seconds for which `scontrol show job` knows a job that has ended (300).
        "MinJobAge": 3600,
        # Seconds from SIGTERM to SIGKILL. They cost no time where the tasks end by themselves.
        "KillWait": 30,
    }


def programs_environment():
    """This environment, with Slurm's programs on the PATH, without variables of an outer Slurm."""
    prefixes = ("SLURM", "SBATCH_", "SRUN_", "SQUEUE_", "SCANCEL_", "SCONTROL_", "SINFO_", "MUNGE_")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(prefixes)
    }
    environment["PATH"] = ":".join(
        [environment.get("PATH", ""), "/usr/sbin", "/usr/local/sbin", "/sbin"]
    )
    missing = [name for name in PROGRAMS if shutil.which(name, path=environment["PATH"]) is None]
    if missing:
        raise SlurmMissing(
            f"not installed: {', '.join(missing)} (Debian: apt-get install slurm-wlm munge)"
        )
    return environment


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def write_configuration(folder, environment, settings):
    """Write slurm.conf and cgroup.conf for fresh ports, and empty the daemons' folders."""
    for name in ["state", *(f"spool.{node}" for node in NODES)]:
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
    controller_port, *node_ports = free_ports(1 + len(NODES))
    user = pwd.getpwuid(os.geteuid()).pw_name
    host = socket.gethostname().split(".")[0]
    settings = {**default_settings(), **settings}
    cred_expire = settings.pop("cred_expire")
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={controller_port}",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        f"AuthInfo=socket={folder}/munge.socket,cred_expire={cred_expire}",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool.%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd.%n.pid",
        f"SlurmctldLogFile={folder}/slurmctld.log",
        f"SlurmdLogFile={folder}/slurmd.%n.log",
        f"SlurmSchedLogFile={folder}/sched.log",
        f"PlugStackConfig={folder}/plugstack.conf",
        "SlurmctldDebug=debug",
        "SlurmdDebug=debug",
        # The default needs cgroups. No other default does, and none needs a database.
        "ProctrackType=proctrack/linuxproc",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "SlurmdParameters=config_overrides",  # trust CPUs= and RealMemory= below
        "ReturnToService=2",
        "MessageTimeout=30",
        "TCPTimeout=10",
        *(f"{name}={value}" for name, value in settings.items()),
        *(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 "
            "RealMemory=8000 State=UNKNOWN"
            for node, port in zip(NODES, node_ports, strict=True)
        ),
        f"PartitionName=main Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE DefaultTime=10 "
        "State=UP",
    ]
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    (folder / "plugstack.conf").write_text("")
    version = subprocess.run(
        ["slurmctld", "-V"], env=environment, capture_output=True, text=True
    ).stdout
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    # older ones read no cgroup.conf where no plugin of theirs uses cgroups
    (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n" if numbers >= (23, 2) else "")


def start(command, log, environment):
    """Start a program that gets SIGTERM when this thread ends, even by SIGKILL."""
    if shutil.which("setpriv"):
        command = ["setpriv", "--pdeathsig", "TERM", *command]
    with open(log, "ab") as out:
        # its own session: Ctrl-C at pytest must not reach it before the jobs were cancelled
        return subprocess.Popen(
            [str(part) for part in command],
            env=environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def stop(process, seconds=5):
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    if process.poll() is None:
        process.kill()
        process.wait()


def tail(folder):
    texts = []
    for log in sorted(folder.glob("*.log")) + sorted(folder.glob("*.out")):
        texts.append(
            f"== {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-10:])
        )
    return "\n".join(texts)


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


def output(command, environment, seconds=15):
    """What a Slurm command printed, or '' where it failed."""
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout if done.returncode == 0 else ""


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


def cancel_jobs(environment):
    """End all jobs by SIGTERM, and wait a little for those that heed it."""
    if output(["squeue", "--noheader", "--format=%A"], environment):
        output(["scancel", "--quiet", f"--user={pwd.getpwuid(os.geteuid()).pw_name}"], environment)
        wait_until(lambda: not output(["squeue", "--noheader", "--format=%A"], environment), 5)


def end_all(folder):
    """End the cluster's daemons and what its jobs left behind: SIGTERM, a second later SIGKILL."""
    begin = time.monotonic()
    while (left := processes_of(folder)) and time.monotonic() < begin + 10:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM if time.monotonic() < begin + 1 else signal.SIGKILL)
        time.sleep(0.1)


@contextlib.contextmanager
def short_name(folder):
    """`folder`, or a short link to it in /tmp: paths of unix sockets have at most 107 bytes."""
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if len(str(folder)) <= 60:
        yield folder
        return
    place = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    (place / "c").symlink_to(folder)
    try:
        yield place / "c"
    finally:
        (place / "c").unlink()
        place.rmdir()


@contextlib.contextmanager
def cluster(folder, **settings):
    """A running Slurm of the nodes n1 and n2; yields the environment in which its commands work.

    `settings` replace those of `default_settings` or add lines to slurm.conf.
    Raises SlurmMissing where Slurm or munge is not installed.
    """
    environment = programs_environment()
    with short_name(folder) as folder, contextlib.ExitStack() as stack:
        environment["SLURM_CONF"] = f"{folder}/slurm.conf"

        def daemon(name, *options):
            """Start a daemon; its output goes to a file of its name."""
            program = shutil.which(name, path=environment["PATH"])
            return start([program, *options], folder / f"{name}.out", environment)

        key, munge_socket = folder / "munge.key", folder / "munge.socket"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        munge_socket.unlink(missing_ok=True)
        munged = daemon(
            "munged",
            "--foreground",
            "--force",
            f"--socket={munge_socket}",
            f"--key-file={key}",
            f"--log-file={folder}/munged.log",
            f"--pid-file={folder}/munged.pid",
            f"--seed-file={folder}/munged.seed",
        )
        stack.callback(stop, munged)
        if not wait_until(munge_socket.exists, 20, [munged]):
            raise SlurmFailed(f"munged did not start:\n{tail(folder)}")

        def all_idle():
            states = output(
                ["sinfo", "--noheader", "--Node", "--format=%T"], environment, seconds=5
            )
            return states.split() == ["idle"] * len(NODES)

        for _ in range(3):  # another process may have taken one of the free ports meanwhile
            write_configuration(folder, environment, settings)
            attempt = stack.enter_context(contextlib.ExitStack())
            daemons = [munged]
            for name, *options in [
                ["slurmctld", "-D"],
                *(["slurmd", "-D", "-N", node] for node in NODES),
            ]:
                daemons.append(daemon(name, *options))
                attempt.callback(stop, daemons[-1])
            if wait_until(all_idle, 60, daemons):
                break
            attempt.close()
        else:
            raise SlurmFailed(f"Slurm did not start:\n{tail(folder)}")
        try:
            yield environment
        finally:
            cancel_jobs(environment)
            end_all(folder)

"""Sends training runs to Slurm from Python, with submitit: one job for each combination of values.

    python submit.py train-llm.py -e gpt2 --nodes 2 --gpus-per-node 8 -m gpt2 --lr 1e-5,3e-5

The script may be that of any stage. Flags that are unknown here go to it, and values with commas
between them are tried one by one. Slurm starts the processes, so torchrun is not needed. A job that
is preempted, or that reaches its time limit, is queued again and resumes its run.
"""

import argparse
import itertools
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import submitit

LOGS = Path(__file__).resolve().parent.parent / "outputs" / "slurm"


class Training:
    """Runs a script in each process of a job."""

    def __init__(self, command):
        self.command = command

    def __call__(self):
        # RANK, WORLD_SIZE, MASTER_ADDR and so on, as torchrun sets them.
        job = submitit.JobEnvironment()
        variables = submitit.helpers.TorchDistributedEnvironment()
        # Below 32768: Linux gives higher ports to connections, so one of those may be in use.
        variables.master_port = 20000 + int(job.job_id) % 10000
        variables.export(set_cuda_visible_devices=False)
        set_interface(job)
        # Slurm sends its signal to all processes of a job. It is submitit that handles it.
        self.process = subprocess.Popen(self.command, preexec_fn=ignore_usr2)
        if self.process.wait() != 0:
            sys.exit(1)

    def checkpoint(self):
        """Ends the script, before Slurm does. Returns what runs when the job is started again.

        Stages 05 and 06 save on SIGTERM. The others resume from their last checkpoint."""
        self.process.send_signal(signal.SIGTERM)
        # Not `process.wait()`: this runs in a signal handler, which has interrupted that call.
        with suppress(ChildProcessError):
            os.waitpid(self.process.pid, 0)
        return submitit.helpers.DelayedSubmission(Training(self.command))


def set_interface(job):
    """Gloo and NCCL use the network interface by which this node reaches another one of the job.

    By default Gloo takes the address of the host's name, which is often 127.0.1.1."""
    others = [host for node, host in enumerate(job.hostnames) if node != job.node]
    if others:
        with socket.socket(type=socket.SOCK_DGRAM) as connection:
            connection.connect((others[0], 1))  # sends nothing, but chooses a route
            address = connection.getsockname()[0]
        interfaces = {a.address: name for name, nic in psutil.net_if_addrs().items() for a in nic}
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interfaces[address])
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "=" + interfaces[address])  # just this one


def ignore_usr2():
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # otherwise flags of the script could be taken for shortened ones
    )
    parser.add_argument("script", type=Path)
    parser.add_argument("-e", "--experiment-name", required=True)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus-per-node", type=int, default=0, help="0: one process, on the CPU")
    parser.add_argument("--cpus-per-task", type=int, help="for each process, None: Slurm's default")
    parser.add_argument("--hours", type=float, default=24, help="time limit of a job")
    parser.add_argument("--logs", type=Path, default=LOGS)
    args, flags = parser.parse_known_args()

    for values in itertools.product(*(flag.split(",") for flag in flags)):
        chosen = [value for value, flag in zip(values, flags, strict=True) if value != flag]
        name = "-".join([args.experiment_name, *chosen])
        command = [sys.executable, str(args.script.resolve()), "-e", name, *values]
        executor = submitit.AutoExecutor(args.logs, slurm_max_num_timeout=1000)
        executor.update_parameters(
            name=name,
            nodes=args.nodes,
            tasks_per_node=max(1, args.gpus_per_node),
            gpus_per_node=args.gpus_per_node or None,
            cpus_per_task=args.cpus_per_task,
            # When a process fails, the others wait for it in a collective, without an end on GPUs.
            # Not at once: if a job is preempted, one of its processes has to queue it again.
            slurm_srun_args=["--wait=120"],
            timeout_min=int(60 * args.hours),
            slurm_signal_delay_s=300,  # seconds before the time limit
        )
        print(f"job {executor.submit(Training(command)).job_id}: {name}")


if __name__ == "__main__":
    main()

"""Runs scripts in processes that are forked from one that has imported their packages already.

To import torch, transformers and datasets takes about four seconds, longer than most runs of the
tests train. The fork server of `multiprocessing` imports them once for each worker of pytest. A run
is then a process that the server forks, with the environment, the working directory, the arguments
and the session that a process of its own would have. For several ranks it does what torchrun does
on one machine: it forks them, keeps their store and ends them all when one of them fails.

A fork does not reproduce variables that a package reads when it is imported (`can_fork` says so),
the start of an interpreter, torchrun's messages, restarts and rendezvous, and the size of resident
memory. Tests of those start processes, as all tests do where there is a GPU. Linux and macOS.
"""

import atexit
import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

# What the scripts import at once, and what they or these packages import late.
PACKAGES = [
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.staging",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.device_mesh",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "torch.utils.checkpoint",
    "torch.utils.tensorboard",
    "numpy",
    "datasets",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "tokenizers",
    "filelock",
    "psutil",
    "tqdm",
    "safetensors.torch",
]
# Prefixes of variables that take effect when a package is imported, or when Python starts.
READ_AT_IMPORT = ("CUDA_", "HF_", "LD_", "MKL_", "OMP_", "PYTHON", "TORCH")
# But not these: `execute` reads the first, and PyTorch the second when it compiles.
READ_LATER = {"PYTHONPATH", "TORCHINDUCTOR_CACHE_DIR"}
# What a script writes at its end has as many tokens. In stages that gather parameters for each of
# them, that takes longer than the steps of most tests.
SAMPLE = re.compile(r"(?<=sample\(forward, eval_data\[0\], )\d+")
# Seconds that ranks have between SIGTERM and SIGKILL, as with torchrun.
GRACE = 30
OUTPUTS = ("stdout", "stderr")
SIGNALS = {signal.SIGTERM, signal.SIGINT}

context = multiprocessing.get_context("forkserver")
server_environment = {}
# The path of a new interpreter, without its first entry, which is the folder of the script.
interpreter_path = []


def read_at_import(environment):
    """The part of an environment that takes effect before a run begins."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_AT_IMPORT) and name not in READ_LATER
    }


def start_server(environment):
    """Starts the fork server, unless there is one, in an environment that its packages read."""
    if server_environment:
        return
    command = [sys.executable, "-c", "import sys; print(*sys.path[1:], sep='\\n')"]
    bare = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    printed = subprocess.run(command, env=bare, capture_output=True, text=True, check=True)
    interpreter_path.extend(printed.stdout.splitlines())
    context.set_forkserver_preload(PACKAGES)
    server_environment.update(environment)
    own = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(own)


def can_fork(environment):
    """Whether a forked run sees this environment as a started one does."""
    return read_at_import(environment) == read_at_import(server_environment)


class ForkedRun:
    """A run of a script, with the part of the interface of `subprocess.Popen` that tests use.

    Args:
        path: the script.
        processes (int or None): the number of ranks; None for one process without a launcher.
        flags (list[str]): the arguments of the script.
        environment (dict[str, str]): all environment variables.
        cwd (path or None): the working directory; None for the one of this process.
        sample (str): the number of tokens of the sample; empty for the script's own.
    """

    def __init__(self, path, processes, flags, environment, cwd=None, sample=""):
        self.args = [str(path), *flags]
        self.output = None
        self.folder = tempfile.TemporaryDirectory()
        for name in OUTPUTS:
            Path(self.folder.name, name).touch()
        where = (str(cwd or os.getcwd()), interpreter_path, self.folder.name)
        args = (str(path), processes, flags, environment, sample, *where)
        self.process = context.Process(target=run, args=args)
        self.process.start()
        self.pid = self.process.pid

    @property
    def returncode(self):
        return self.process.exitcode

    def poll(self):
        return self.process.exitcode

    def send_signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            if self.process.exitcode is None:
                os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout=None):
        """What the run wrote to its standard output and its standard error."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        if self.output is None:
            files = [Path(self.folder.name, name) for name in OUTPUTS]
            self.output = tuple(file.read_text(errors="replace") for file in files)
            self.folder.cleanup()
        return self.output


def run(path, processes, flags, environment, sample, cwd, python_path, folder):
    """The first process of a run: the script itself, or the launcher of its ranks."""
    # A collection would visit, and so copy, the memory of all that was imported.
    gc.freeze()
    # A shell that starts pytest in the background has it ignore SIGINT, and so its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    for descriptor, name in enumerate(OUTPUTS, start=1):
        file = os.open(Path(folder, name), os.O_WRONLY | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path[:] = python_path
    if processes is None:
        execute(path, flags, sample)
    else:
        sys.exit(launch(path, processes, flags, sample))


def execute(path, flags, sample):
    """Runs a script as `python path flags` does."""
    sys.argv = [path, *flags]
    own = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:0] = [str(Path(path).parent), *own]
    customizations = [Path(entry, "sitecustomize.py") for entry in own]
    for customization in filter(Path.exists, customizations):
        exec(compile(customization.read_text(), customization, "exec"), {})
    text = Path(path).read_text()
    text = SAMPLE.sub(sample, text) if sample else text
    module = type(sys)("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    try:
        exec(compile(text, path, "exec"), vars(module))
    finally:
        # Python calls these functions at the end of a process, but not of one that was forked.
        atexit._run_exitfuncs()


def launch(path, processes, flags, sample):
    """Forks the ranks and waits for them. Returns the exit code of torchrun."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=worker, args=(path, flags, sample, rank, processes, port, listener))
        for rank in range(processes)
    ]
    store = None
    try:
        # Python ignores an exception in what it calls around a fork, such as that of Ctrl-C.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        for rank in ranks:
            rank.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        # It has a thread, so it is created after the forks. Until then the ranks wait in the
        # queue of the listening socket.
        from torch.distributed import TCPStore

        how = {"is_master": True, "wait_for_workers": False}
        store = TCPStore("127.0.0.1", port, master_listen_fd=listener.detach(), **how)
        running = {rank.sentinel: rank for rank in ranks}
        while running:
            for sentinel in multiprocessing.connection.wait(running):
                ended = running.pop(sentinel)
                ended.join()
                if ended.exitcode != 0:
                    return 1
        return 0
    finally:
        for rank in ranks:
            rank.terminate()
        for rank in ranks:
            rank.join(GRACE)
            rank.kill()
            rank.join()
        del store


def worker(path, flags, sample, rank, processes, port, listener):
    """One rank: the variables that torchrun sets, then the script."""
    listener.close()
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    for prefix in ("", "LOCAL_", "ROLE_"):
        os.environ[f"{prefix}RANK"] = str(rank)
        os.environ[f"{prefix}WORLD_SIZE"] = str(processes)
    os.environ.update(
        GROUP_RANK="0",
        GROUP_WORLD_SIZE="1",
        ROLE_NAME="default",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0",
        TORCHELASTIC_RUN_ID="forked",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    execute(path, flags, sample)

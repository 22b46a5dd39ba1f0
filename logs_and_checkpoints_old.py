"""Logging and checkpoints: the one module that all stages share.

Logging happens on rank 0 only, and sends nothing between ranks: the script does that before it
logs. The functions that save and load checkpoints must be called by every rank.
"""

import contextlib
import fcntl
import itertools
import json
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import sys
import textwrap
import threading
import time
import warnings
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers.core_model_loading import revert_weight_conversion


def read_variables():
    """The numbers in torchrun's environment variables, by name. Ends the run if one is invalid."""
    stop = f"{Path(sys.argv[0]).name}: error: "
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    defaults |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
    numbers = {}
    for name, default in defaults.items():
        text = os.environ.get(name, default)
        if not re.fullmatch("[0-9]{1,9}", text):
            sys.exit(f"{stop}{name}={text!r}: must be a whole number; torchrun sets this variable")
        numbers[name] = int(text)
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if numbers[rank] >= numbers[size]:
            problem = f"must be below {size}, which is {numbers[size]}"
            sys.exit(f"{stop}{rank}={numbers[rank]}: {problem}; torchrun sets these variables")
    return numbers


# torchrun sets these for each process. Without torchrun there is one process, rank 0 of 1.
VARIABLES = read_variables()
RANK = VARIABLES["RANK"]
LOCAL_RANK = VARIABLES["LOCAL_RANK"]
WORLD_SIZE = VARIABLES["WORLD_SIZE"]

# The stage of the course, which is the name of the script's folder, such as 01-single-gpu.
STAGE = Path(sys.argv[0]).resolve().parent.name

# The names of the numbers that `memory_gb` returns.
MEMORY = ("current_allocated", "peak_allocated", "current_reserved", "peak_reserved", "state")
MEMORY_METRICS = [f"memory/{name}_gb" for name in MEMORY]
# What the console shows of the metrics, and how. metrics.jsonl has all of them.
CONSOLE_FORMATS = {
    "train/loss": ".4f",
    "train/learning_rate": ".2e",
    "train/grad_norm": ".3f",
    "throughput/tokens_per_second": ",.0f",
    "throughput/mfu": ".1%",
    "eval/loss": ".4f",
    "eval/perplexity": ".2f",
}
# The names of data types in safetensors files.
SAFETENSORS_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# Features of Comet that are turned off: the script logs its own metrics and flags. Those that are
# on describe the machine, and its load while the run goes on.
COMET_OFF = "log_code log_graph log_git_metadata log_git_patch parse_args"
COMET_OFF += " auto_param_logging auto_metric_logging auto_output_logging"
COMET_ON = "log_env_details log_env_host log_env_gpu log_env_cpu log_env_network"
# torch.distributed.checkpoint (DCP) warns if there is one process and no process group.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def say(message):
    """Prints a line on rank 0, above the progress bar."""
    if RANK == 0:
        tqdm.write(message)
        sys.stdout.flush()


def fail(message):
    """Ends the run with one line and exit code 2, for errors that the user can fix.

    Usually all ranks of a node fail for the same reason. The first one (LOCAL_RANK 0) reports it,
    and then torchrun stops the others. They wait 60 s and report it only if they still run then."""
    if LOCAL_RANK > 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # do not let a script's handler delay the end
        time.sleep(60)

    line = " ".join(part.strip() for part in message.splitlines() if part.strip())
    if len(line) > 2000:
        line = f"{line[:1000]} ... {line[-1000:]}"
    say_last(f"{Path(sys.argv[0]).name}: error: {line}")
    sys.exit(2)


@contextlib.contextmanager
def reading(source, but_not=()):
    """Ends the run in one line if what the user has named, such as a file, cannot be read.

    `source` is the flag with its value. Damaged files make the libraries raise errors of any type.
    Only the code that reads them belongs in this block: errors elsewhere are bugs, and for a bug
    you want to see the traceback. Errors of a type in `but_not` are raised as they are."""
    try:
        yield
    except Exception as error:
        if isinstance(error, but_not):
            raise
        cause = error.__cause__ or ""
        fail(f"{source}: {type(error).__name__}: {error} {cause}")


def say_last(line):
    """Writes a line to stderr that the user should find at the end of what the run has printed.

    torchrun adds a traceback of its own when one of its processes has failed, some 40 lines. So a
    process is left behind that waits until torchrun has ended, and then repeats the line. It gives
    up after ten minutes: torchrun may have started the processes again."""
    tqdm.write(line, file=sys.stderr)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        sys.stderr.flush()
        torchrun = psutil.Process(os.getppid())
        left_behind = os.fork()  # 0 in the new process
        os.setpgid(left_behind, 0)  # torchrun sends signals to the group of this process
        if left_behind == 0:
            os.closerange(3, 2**16)  # files and connections of this process
            deadline = time.monotonic() + 600
            while time.monotonic() < deadline:
                if not torchrun.is_running() or torchrun.status() == psutil.STATUS_ZOMBIE:
                    os.write(2, f"{line}\n".encode(errors="backslashreplace"))
                    break
                time.sleep(0.02)
            os._exit(0)


def memory_gb(model, optimizer, device):
    """Memory of this rank in GB (1e9 bytes): a CPU tensor, (5,) float64, see `MEMORY_METRICS`.

    "state" is parameters, gradients and optimizer state. Without a GPU the other numbers are the
    memory of the whole process (its resident set)."""
    tensors = list(model.parameters())
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    for state_of_parameter in optimizer.state.values():
        tensors += state_of_parameter.values()
    # Of a DTensor, a tensor that is spread over ranks, this rank holds a part.
    tensors = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    state = sum(t.nbytes for t in tensors)

    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        reserved = torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()
    else:
        current = psutil.Process().memory_info().rss
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if sys.platform != "darwin":
            peak *= 1024  # Linux counts in KiB, macOS in bytes
        allocated = reserved = current, max(current, peak)
    return torch.tensor([*allocated, *reserved, state], dtype=torch.float64) / 1e9


def print_unless_os_error(error):
    """What `threading.excepthook` is set to."""
    if not issubclass(error.exc_type, OSError):
        threading.__excepthook__(error)


def lock_run_dir(run_dir, timeout=10):
    """Ends the run if another one trains in the folder: they would mix their files.

    Rank 0 locks the file `lock` for as long as it lives. The system releases the lock when the
    process ends, also after kill -9. Whether a second machine sees the lock depends on the file
    system: on NFS it does, on Lustre with the option flock.
    A process that is ending still holds the lock for a moment. A process of the same torchrun job,
    on a machine that has lost its connection, may hold it for up to `timeout` seconds."""
    if RANK > 0:
        return
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    lock = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT)  # it stays open
    start = time.monotonic()
    has_said = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            text = os.pread(lock, 1000, 0).decode(errors="replace")
            holder, _, holder_run_id = text.partition("\n")
            holder = holder or "another process"
        except OSError as error:
            say(f"{run_dir} cannot be locked ({error}): start no other run with this name")
            return
        is_same_run = run_id not in ("", "none") and holder_run_id == run_id
        longest_wait = timeout if is_same_run else 10
        if not has_said:
            say(f"{holder} trains in {run_dir}: waiting for {longest_wait:.0f} s")
            has_said = True
        if time.monotonic() > start + longest_wait:
            ways_out = "end it, or choose another name"
            ways_out += f" (if its machine is gone, remove {run_dir}/lock)"
            fail(f"-e {run_dir.name}: {holder} trains in {run_dir}: {ways_out}")
        time.sleep(0.1)

    os.ftruncate(lock, 0)
    os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n{run_id}".encode(), 0)


class RunLog:
    """Logs a run to the console and, if it has a folder, to metrics.jsonl, TensorBoard and Comet.

    The run continues after `last_step`, in the Comet experiment `comet_key` if there is one.
    `run_info` needs device_name, peak_flops and flops_per_token."""

    def __init__(self, run_dir, last_step, total_steps, comet_key, flags, run_info):
        self.run_dir = run_dir if RANK == 0 else None
        self.last_step = last_step
        self.total_steps = total_steps
        self.flags = flags
        self.run_info = run_info
        self.on_gpu = run_info["device_name"] != "CPU"
        self.laps = []
        self.checkpoint_metrics = {}
        self.comet = None
        self.comet_key = comet_key or os.urandom(16).hex()
        self.next_archive = 0.0
        self.bar = tqdm(initial=last_step, total=total_steps, unit="step", disable=RANK > 0 or None)

        if self.run_dir:
            try:
                self.open_files()
            except (OSError, ValueError, LookupError, TypeError) as error:
                fail(f"--save-dir {run_dir}: {error}")
            self.open_comet()
        self.lap("outside")

    def open_files(self):
        """Opens the run's files, and removes what was logged after the step it continues from."""
        write_flags(self.run_dir / "flags.txt", self.flags)

        path = self.run_dir / "metrics.jsonl"
        if not path.is_file():
            raise OSError("metrics.jsonl is not a file")
        kept = {}
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("}\n"):  # a kill may cut the last one
                step = json.loads(line)["step"]
                if step <= self.last_step:
                    kept[step] = line
        last_logged = max(kept, default=0)
        if self.last_step - last_logged >= self.flags["log_freq"]:
            say(f"metrics.jsonl has no lines between step {last_logged} and step {self.last_step}")
        path.with_suffix(".tmp").write_text("".join(kept.values()))
        path.with_suffix(".tmp").replace(path)
        self.metrics_file = path.open("a", buffering=1)

        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        # TensorBoard writes in a thread. An error there is raised again by the next call, which
        # ends the run in one line. The thread need not print it as well.
        threading.excepthook = print_unless_os_error

        # TensorBoard shows the path of a folder as the name of the run.
        folder = self.run_dir / "tensorboard" / STAGE
        self.board = SummaryWriter(folder, purge_step=self.last_step + 1)
        flags = (self.run_dir / "flags.txt").read_text()
        self.board.add_text("flags", textwrap.indent(flags, "    "), self.last_step)

    def open_comet(self):
        """Starts or continues the Comet experiment. Whatever goes wrong, training goes on."""
        online = os.environ.get("COMET_START_ONLINE", "").lower() not in ("0", "false", "no")
        self.comet_offline = self.flags["comet_offline"] or not online
        if not self.comet_offline and "COMET_API_KEY" not in os.environ:
            say("Comet is off: set COMET_API_KEY, or use --comet-offline without an account")
            return

        # A server that does not answer delays the start by two requests of 10 s, not by 200 s.
        os.environ.setdefault("COMET_LOGGING_CONSOLE", "CRITICAL")
        os.environ.setdefault("COMET_HTTP_SESSION_RETRY_TOTAL", "1")
        os.environ.setdefault("COMET_GET_OR_ADD_EXPERIMENT_RETRY_TOTAL", "1")
        import comet_ml

        try:
            config = comet_ml.ExperimentConfig(
                name=self.flags["experiment_name"],
                offline_directory=str(self.run_dir / "comet"),
                display_summary_level=0,
                **dict.fromkeys(COMET_OFF.split(), False),
                **dict.fromkeys(COMET_ON.split(), True),
            )
            self.comet = comet_ml.start(
                project_name=self.flags["comet_project_name"],
                workspace=self.flags["comet_workspace"],
                experiment_key=self.comet_key,
                online=not self.comet_offline,
                experiment_config=config,
            )
            versions = {"torch": torch.__version__, "transformers": transformers.__version__}
            ours = {"stage": STAGE, "world_size": WORLD_SIZE, **versions, **self.run_info}
            self.comet.log_parameters({**self.flags, **ours})
            self.comet.log_other("command", shlex.join(sys.argv))
            self.comet.add_tags([STAGE, self.flags["model_name"], self.flags["dataset_name"]])
            if not self.comet_offline:
                (self.run_dir / "comet").mkdir(exist_ok=True)
                (self.run_dir / "comet" / "address.txt").write_text(f"{self.comet.url}\n")
        except Exception as error:
            say(f"Comet cannot be reached, training goes on without it: {error!r:.120}")

    def lap(self, phase):
        """Ends a phase of the step: the time since the last lap belongs to it.

        A GPU works asynchronously, so there time is measured with CUDA events."""
        if self.on_gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        self.laps.append((phase, now))

    def pop_times(self):
        """Milliseconds per step in each phase since the last call, as metrics.

        The phase "outside" (evaluation, checkpoints) is not part of a step."""
        if self.on_gpu:
            self.laps[-1][1].synchronize()

        milliseconds = Counter()
        for (_, before), (phase, now) in itertools.pairwise(self.laps):
            elapsed = before.elapsed_time(now) if self.on_gpu else 1000 * (now - before)
            milliseconds[phase] += elapsed
        steps = sum(phase == "update" for phase, _ in self.laps[1:])  # a step has one of these
        self.laps = self.laps[-1:]

        del milliseconds["outside"]
        milliseconds["total"] = milliseconds.total()
        return {f"time/{phase}_ms": ms / steps for phase, ms in milliseconds.items()}

    def step(self, step, metrics):
        """Logs an optimizer step. `metrics` is empty in steps that are not logged."""
        self.last_step = step
        self.bar.update()
        if RANK > 0 or not metrics:
            return

        metrics = {**metrics, **self.checkpoint_metrics}
        self.checkpoint_metrics = {}
        if "train/loss" in metrics:  # it is not in steps that only evaluate
            tokens_per_step = self.flags["global_batch_size"] * self.flags["seq_length"]
            tokens_per_second = 1000 * tokens_per_step / metrics["time/total_ms"]
            metrics["train/tokens_seen"] = step * tokens_per_step
            metrics["throughput/tokens_per_second"] = tokens_per_second
            # Model FLOPs utilization: the model's own arithmetic as a share of the devices' peak
            # (PaLM, arXiv:2204.02311, appendix B).
            if self.run_info["peak_flops"]:
                flops = tokens_per_second * self.run_info["flops_per_token"]
                metrics["throughput/mfu"] = flops / (WORLD_SIZE * self.run_info["peak_flops"])
            self.bar.set_postfix_str(f"loss {metrics['train/loss']:.3f}")

        columns = [f"step {step:>5}/{self.total_steps}"]
        for name, form in CONSOLE_FORMATS.items():
            if name in metrics:
                short_name = name.removeprefix("train/").removeprefix("throughput/")
                columns.append(f"{short_name} {metrics[name]:{form}}")
        say("  ".join(columns))
        if self.run_dir:
            try:
                self.write(step, metrics)
            except OSError as error:
                fail(f"--save-dir {self.run_dir}: {error}")

    def write(self, step, metrics):
        """Writes metrics to the run's folder and to Comet."""
        if shutil.disk_usage(self.run_dir).free < 2**20:
            raise OSError("the disk is full")
        # JSON has neither NaN nor infinity. Both become null.
        finite = {k: v if abs(v) < float("inf") else None for k, v in metrics.items()}
        self.metrics_file.write(json.dumps({"step": step, **finite}) + "\n")
        for name, number in metrics.items():
            self.board.add_scalar(name, number, step)
        if step == self.total_steps:  # for TensorBoard's table of runs, HPARAMS
            flags = {name: str(value) for name, value in self.flags.items()}
            result = {"eval/loss": metrics["eval/loss"]}
            self.board.add_hparams(flags, result, run_name=".", global_step=step)
        if self.comet:
            self.comet.log_metrics(metrics, step=step)

    def sample(self, prompt, continuation):
        """Logs what the model has written after a prompt, both as text."""
        say(f"prompt, from text that the model was not trained on: {prompt}")
        say(f"what the model writes after it: {continuation}")
        if self.run_dir:
            text = f"prompt:\n{prompt}\n\nwhat the model writes after it:\n{continuation}"
            self.board.add_text("sample", textwrap.indent(text, "    "), self.last_step)
            if self.comet:
                self.comet.log_text(text, step=self.last_step)

    def after_checkpoint(self, metrics):
        """Adds the metrics of a checkpoint to the next line of the log.

        Offline, Comet writes its archive when the experiment ends, so a kill would lose it. It is
        ended here and continued in a new archive, at most every five minutes (that takes 1 s)."""
        self.checkpoint_metrics = metrics
        is_due = time.monotonic() > self.next_archive and self.last_step < self.total_steps
        if self.comet and self.comet_offline and is_due:
            self.comet.end()
            self.open_comet()
            self.next_archive = time.monotonic() + 300

    def close(self):
        """Closes the files, sends what Comet still holds, and says where it is to be seen."""
        self.bar.close()
        if self.run_dir:
            self.board.close()
        if self.comet:
            self.comet.end()
            if self.comet_offline:
                archives = shlex.quote(f"{self.run_dir}/comet")
                say(f"to upload the run to Comet: comet upload {archives}/*.zip")
            else:
                say(f"the run on Comet: {self.comet.url}")


def write_flags(path, flags):
    """Writes flags as command-line arguments, one per line: `train-llm.py @flags.txt` reads it.

    A value may begin with - or @, so there is a = before it."""
    lines = []
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            lines.append(flag)
        elif value is False and not name.startswith("no_"):  # there is no flag --no-no-...
            lines.append(f"--no-{flag[2:]}")
        elif value is not None and value is not False:
            lines.append(shlex.quote(f"{flag}={value}"))
    path.write_text("".join(f"{line}\n" for line in lines))


# Checkpoints. Tensors are saved by torch.distributed.checkpoint (DCP), whose files can be loaded
# with any number of ranks. state.json holds the rest: the dict `values`, the size and CRC-32
# checksum of each file, and a checksum of its own.


class CheckpointWriter(dcp.FileSystemWriter):
    """Makes sure that a checkpoint is either complete or not there. DCP saves with this object.

    The files go to step-00000200.tmp. When all ranks have written theirs, the folder is renamed to
    step-00000200. DCP calls, in this order, `prepare_global_plan` on rank 0, `write_data` on every
    rank, and `finish` on rank 0. The newest `keep` checkpoints of the run are kept."""

    def __init__(self, run_dir, step, values, keep):
        self.run_dir = run_dir
        self.folder = run_dir / f"step-{step:08d}"
        self.values = {**values, "step": step}
        self.keep = keep
        self.start = time.perf_counter()
        self.save_ms = 0.0  # known on rank 0, when the checkpoint is complete
        super().__init__(self.folder.with_suffix(".tmp"))

    def prepare_global_plan(self, plans):
        """Checks that there is enough space, before anything is written."""
        needed = 0
        for item in itertools.chain.from_iterable(plan.items for plan in plans):
            needed += (
                item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
            )
        if shutil.disk_usage(self.run_dir).free < 1.01 * needed + 2**20:
            raise OSError(f"it takes {needed:,}")
        return super().prepare_global_plan(plans)

    def write_data(self, plan, planner):
        """Writes the files of this rank, and computes their checksums."""
        try:
            results = super().write_data(plan, planner).wait()
        except OSError:
            # The run will end. Python 3.13 would print a traceback for each file of DCP's that
            # cannot be flushed, behind the line that says why.
            sys.unraisablehook = lambda unraisable: None
            raise
        names = {result.storage_data.relative_path for result in results}
        files = {name: size_and_crc(self.path / name) for name in names}
        # DCP gathers what this future holds from all ranks, and gives the list to `finish`.
        future = torch.futures.Future()
        future.set_result((results, files))
        return future

    def finish(self, metadata, results):
        """Writes DCP's .metadata and state.json, renames the folder, removes old checkpoints."""
        super().finish(metadata, [results_of_rank for results_of_rank, _ in results])
        files = {".metadata": size_and_crc(self.path / ".metadata")}
        for _, files_of_rank in results:
            files.update(files_of_rank)

        values = {**self.values, "files": files}
        values["crc32"] = zlib.crc32(json.dumps(values).encode())
        (self.path / "state.json").write_text(json.dumps(values))

        # The files must be on the disk before the name says that they are.
        flush(self.path / "state.json")
        flush(self.path)
        self.path.rename(self.folder)
        flush(self.run_dir)
        for old, _ in list(checkpoints(self.run_dir))[self.keep :]:
            remove(old.with_suffix(".old"))
            remove(old.rename(old.with_suffix(".old")))
        self.save_ms = 1000 * (time.perf_counter() - self.start)

    def end_run(self, error):
        """Ends the run after DCP's CheckpointException. Earlier checkpoints stay as they are."""
        shutil.rmtree(self.path, ignore_errors=True)
        if isinstance(cause_of(error), KeyboardInterrupt):  # Ctrl-C
            raise KeyboardInterrupt
        free = shutil.disk_usage(self.run_dir).free
        problem = f"{self.folder.name} not saved, {free:,} bytes are free: {cause_of(error)}"
        fail(f"--save-dir {self.run_dir}: {problem}")


def cause_of(error):
    """What went wrong on the first rank that failed, from DCP's CheckpointException."""
    cause, _ = next(iter(error.failures.values()))
    return cause


def save_checkpoint(run_dir, step, model, optimizer, values, keep):
    """Saves model, optimizer and the dict `values`, and keeps the newest `keep` checkpoints.

    Returns metrics: how long it took, and how long training stood still (stall), which is the same
    here. If the disk is full, the run ends in one line."""
    writer = CheckpointWriter(run_dir, step, values, keep)
    try:
        dcp.save(checkpoint_tensors(model, optimizer), storage_writer=writer)
    except dcp.api.CheckpointException as error:
        writer.end_run(error)
    return {"checkpoint/save_ms": writer.save_ms, "checkpoint/stall_ms": writer.save_ms}


def checkpoint_tensors(model, optimizer):
    """This rank's part of the tensors in a checkpoint, under names that are the same in all stages.

    Hyperparameters of the optimizer are not among them: they come from the flags."""
    model_state, optimizer_state = dcp_state.get_state_dict(model, optimizer)
    return {"model": model_state, "moments": optimizer_state["state"]}


def load_checkpoint(run_dir, model, optimizer):
    """Loads the newest intact checkpoint. Returns its `values`, {"step": 0} if there is none."""
    if RANK == 0:
        # Remove what a kill has left of a save (.tmp) or of removing an old checkpoint (.old).
        with reading(f"--save-dir {run_dir}"):
            for pattern in ("step-????????.tmp", "step-????????.old"):
                for leftover in run_dir.glob(pattern):
                    remove(leftover)

    folder, values = newest_intact(run_dir)
    if folder is None:
        return {"step": 0}
    tensors = checkpoint_tensors(model, optimizer)
    reader = dcp.FileSystemReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    for name, tensor in tensors["model"].items():
        if f"model.{name}" not in saved:
            fail(f"{folder} is of another model: it has no {name}")
        shape = tuple(saved[f"model.{name}"].size)
        if shape != tensor.shape:
            shapes = f"{name} is {shape} there and {tuple(tensor.shape)} here"
            fail(f"{folder} is of another model: {shapes}")
    try:
        dcp.load(tensors, storage_reader=reader)
    except dcp.api.CheckpointException as error:
        fail(f"{folder} cannot be loaded: {cause_of(error)}")

    dcp_state.set_model_state_dict(model, tensors["model"])
    optimizer_state = dcp_state.get_optimizer_state_dict(model, optimizer)  # hyperparameters
    optimizer_state["state"] = tensors["moments"]
    dcp_state.set_optimizer_state_dict(model, optimizer, optimizer_state)
    say(f"resumed from {folder}")
    return values


def newest_intact(run_dir):
    """Folder and values of the newest intact checkpoint, (None, None) if there is none.

    Damaged ones are reported and renamed. All ranks use rank 0's list, so they agree on one."""
    for folder, values in all_gather_object(list(checkpoints(run_dir)))[0]:
        damaged = damaged_files(folder, values)
        if not damaged:
            return folder, values
        names = ", ".join(damaged)
        say(f"{folder} is damaged ({names}): renamed .damaged, the one before is used")
        if RANK == 0:
            with reading(f"--save-dir {run_dir}"):
                remove(folder.with_suffix(".damaged"))
                folder.rename(folder.with_suffix(".damaged"))
    return None, None


def damaged_files(folder, values):
    """Names of the files that are not as they were written. Each file is read by one rank."""
    if values is None:
        return ["state.json"]
    files = sorted(values["files"].items())[RANK::WORLD_SIZE]
    damaged = [name for name, known in files if size_and_crc(folder / name) != known]
    return list(itertools.chain.from_iterable(all_gather_object(damaged)))


def checkpoints(run_dir):
    """Yields folder and values of each checkpoint, newest first. Damaged values are None."""
    for folder in sorted(run_dir.glob("step-????????"), reverse=True):
        try:
            values = json.loads((folder / "state.json").read_text())
            if "experiment" in values and "crc32" not in values:
                fail(f"{folder} was saved by one of the stages 01 to 03: this one has other files")
            intact = values.pop("crc32") == zlib.crc32(json.dumps(values).encode())
            intact = intact and {"files", "flags", "step"} <= values.keys()
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            intact = False
        yield folder, values if intact else None


def remove(path):
    """Removes the folder, file or link at this path, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def all_gather_object(value):
    """A list with the value of each rank, on every rank."""
    values = [value] * WORLD_SIZE
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    return values


def size_and_crc(path):
    """Size in bytes and CRC-32 of a file. None if it is missing or empty."""
    if not path.is_file() or path.stat().st_size == 0:
        return None
    content = np.memmap(path, mode="r")
    return [content.size, zlib.crc32(content)]


def flush(path):
    """Waits until a file, or the list of entries of a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def gather_tensor(tensors, name, like):
    """The whole of a tensor that the ranks may have in shards. All of them must call it."""
    tensor = tensors[name]
    if isinstance(tensor, DTensor):
        # With --cpu-offload the shard is on the CPU, but the mesh is one of GPUs.
        tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()
    return tensor


def save_final_model(run_dir, step, model, config, tokenizer, dtype, gather=gather_tensor):
    """Writes weights (as `dtype`) and tokenizer to `run_dir`/final_model, for `from_pretrained`.

    All ranks must call it. A sharded model is gathered block by block, and rank 0 writes each block
    before the next one is gathered. So no rank ever holds the whole model."""
    with torch.device("meta"):
        empty_model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    blocks = gather_blocks(model, dict(named_tensors(empty_model)), gather)
    problem = None
    if RANK == 0:
        try:
            write_final_model(run_dir, step, blocks, empty_model, config, tokenizer)
        except Exception as error:
            problem = f"--save-dir {run_dir}: final_model was not written: {error}"
    for _ in blocks:  # all ranks must gather all blocks, also if rank 0 has ended with an error
        pass
    if problem := all_gather_object(problem)[0]:
        fail(problem)


def named_tensors(model):
    """Yields parameters and persistent buffers with their names, tied weights under one name."""
    names = model.state_dict().keys()
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if name in names:
            yield name, tensor


def gather_blocks(model, wanted, gather):
    """Yields dicts of CPU tensors by name on rank 0, empty dicts on other ranks: one per block.

    `wanted` has the names, and the data types to which the tensors are converted. What belongs to
    no block, such as the embeddings, is a dict by itself."""
    tensors = dcp_state.get_model_state_dict(model)

    def block_of(name):
        return re.match(r".*?\.\d+\.|.*", name)[0]  # such as model.layers.0.

    for _, names in itertools.groupby(sorted(wanted, key=block_of), key=block_of):
        block = {}
        for name in names:
            tensor = gather(tensors, name, wanted[name])
            if RANK == 0:
                block[name] = tensor.to("cpu", wanted[name].dtype)
        yield block


def write_final_model(run_dir, step, blocks, empty_model, config, tokenizer):
    """Writes the model to final_model.tmp, which replaces final_model when it is complete."""
    temporary = run_dir / "final_model.tmp"
    remove(temporary)
    temporary.mkdir()

    empty_model.config.architectures = [type(empty_model).__name__]
    empty_model.config.save_pretrained(temporary)
    empty_model.generation_config.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    # Settings of `generate` that came with pretrained weights, if there are any.
    with contextlib.suppress(OSError, ValueError):
        generation = transformers.GenerationConfig.from_pretrained(config.name_or_path)
        generation.to_json_file(temporary / "generation_config.json")

    # For some architectures the tensors in files have other names than the parameters of the model,
    # or are parts of them. This gives their names and shapes; `empty_model` has no values.
    tensors = revert_weight_conversion(empty_model, dict(named_tensors(empty_model)))
    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size="5GB"
    )
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (temporary / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    files = {}
    for file_name, names in split.filename_to_tensors.items():
        parts = {name: tensors[name] for name in names}
        files[file_name] = SafetensorsWriter(temporary / file_name, parts)
    for block in blocks:
        for name, tensor in revert_weight_conversion(empty_model, block).items():
            files[split.tensor_to_filename[name]].write(name, tensor)
    for file in files.values():
        file.close()
    # The name of an empty file tells from which step this model is.
    (temporary / f"step-{step:08d}").touch()

    remove(run_dir / "final_model")
    temporary.rename(run_dir / "final_model")


class SafetensorsWriter:
    """A safetensors file that is written tensor by tensor. The library writes all at once.

    The file begins with the length of its header. The header, in JSON, has data type, shape and
    place of each tensor. Source: https://github.com/huggingface/safetensors#format"""

    def __init__(self, path, tensors):
        """Writes the header. `tensors` are on the meta device: they have no values yet."""
        self.header = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, tensor in tensors.items():
            start, end = end, end + tensor.nbytes
            self.header[name] = {
                "dtype": SAFETENSORS_DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(self.header).encode()
        text += b" " * (-len(text) % 8)  # so that the tensors are aligned

        self.file = path.open("wb")
        self.file.write(len(text).to_bytes(8, "little") + text)
        self.start = self.file.tell()

    def write(self, name, tensor):
        """Writes the values of a tensor to their place."""
        start, _ = self.header[name]["data_offsets"]
        self.file.seek(self.start + start)
        self.file.write(tensor.flatten().view(torch.uint8).numpy())

    def close(self):
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()

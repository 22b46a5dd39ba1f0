"""Logging and checkpoints: the one module that all rungs share.

Logging contains no collective. The script reduces what it wants to log, and rank 0 writes it.
The functions for checkpoints are collectives: every rank must call them.
"""

import contextlib
import itertools
import json
import os
import resource
import shlex
import shutil
import signal
import sys
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
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.tensor import DTensor
from tqdm import tqdm

# torchrun sets these for each process. Without torchrun there is one process, rank 0 of 1.
RANK = int(os.environ.get("RANK", 0))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))

# What `memory_gb` measures, in its order.
MEMORY_METRICS = (
    "memory/current_allocated_gb",
    "memory/peak_allocated_gb",
    "memory/current_reserved_gb",
    "memory/peak_reserved_gb",
    "memory/state_gb",
)
# What the console shows of the metrics, and how. metrics.jsonl has all of them.
CONSOLE_FORMATS = {
    "loss": ".4f",
    "learning_rate": ".2e",
    "grad_norm": ".3f",
    "tokens_per_second": ",.0f",
    "mfu": ".1%",
    "eval/loss": ".4f",
    "eval/perplexity": ".2f",
}
# What Comet would collect by itself. The script logs its own metrics and flags.
COMET_AUTOMATIC = (
    "log_code",
    "log_graph",
    "log_git_metadata",
    "log_git_patch",
    "log_env_details",
    "parse_args",
    "auto_param_logging",
    "auto_metric_logging",
    "auto_output_logging",
)
# DCP, the library that writes checkpoints, warns that rung 01 has no process group.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def say(message):
    """Prints a line on rank 0, above the progress bar."""
    if RANK == 0:
        tqdm.write(message)
        sys.stdout.flush()


def fail(message):
    """Ends the run because of something that the user can mend: one line, and exit code 2.

    The ranks of a node usually meet the same problem. The first of them reports it, and then
    torchrun stops the others, which wait here. One that is alone with its problem reports it after
    a minute."""
    if LOCAL_RANK > 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # rung 05 has a handler that goes on
        time.sleep(60)

    line = " ".join(part.strip() for part in message.splitlines() if part.strip())
    sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {line[:2000]}\n")
    sys.exit(2)


def memory_gb(model, optimizer, device):
    """Memory of this rank in GB (1e9 bytes): a CPU tensor, (5,) float64, see `MEMORY_METRICS`.

    The last number counts parameters, gradients and optimizer state. Without a GPU the others are
    the memory of the whole process (its resident set)."""
    tensors = list(model.parameters())
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    for moments in optimizer.state.values():
        tensors += moments.values()
    # Of a DTensor, a tensor that is spread over ranks, this rank holds a part.
    tensors = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    state = sum(t.nbytes for t in tensors)

    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        reserved = torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()
    else:
        current = psutil.Process().memory_info().rss
        unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
        peak = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        allocated = reserved = current, max(current, peak)
    return torch.tensor([*allocated, *reserved, state], dtype=torch.float64) / 1e9


class RunLog:
    """Logs a run to the console and, if it has a folder, to metrics.jsonl, TensorBoard and Comet.

    `start` is the step that the run resumes from, `comet_key` the Comet experiment that it
    continues, if any. `facts` needs "device_name"; for tokens/s and MFU see `step`."""

    def __init__(self, run_dir, start, total_steps, comet_key, flags, facts):
        self.run_dir = run_dir if RANK == 0 else None
        self.flags = flags
        self.facts = facts
        self.checkpoint_metrics = {}
        self.on_gpu = facts["device_name"] != "CPU"
        self.laps = []
        self.comet_key = comet_key or os.urandom(16).hex()
        self.comet = None
        self.next_archive = 0.0
        self.bar = tqdm(initial=start, total=total_steps, unit="step", disable=RANK > 0 or None)

        if self.run_dir:
            try:
                self.open_files(start)
            except OSError as error:
                fail(f"--save-dir {run_dir}: {error}")
            self.open_comet()
        self.lap("outside")

    def open_files(self, start):
        """Opens the run's files, and removes what was logged after step `start`."""
        write_flags(self.run_dir / "flags.txt", self.flags)

        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        complete = [line for line in lines if line.endswith("}\n")]  # a kill may cut the last one
        kept = [line for line in complete if json.loads(line)["step"] <= start]
        path.with_suffix(".tmp").write_text("".join(kept))
        path.with_suffix(".tmp").replace(path)
        self.metrics_file = path.open("a", buffering=1)

        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        self.board = SummaryWriter(self.run_dir / "tensorboard", purge_step=start + 1)

    def open_comet(self):
        """Starts or continues the Comet experiment. Whatever goes wrong, training goes on."""
        online = os.environ.get("COMET_START_ONLINE", "").lower() not in ("0", "false", "no")
        self.comet_offline = self.flags["comet_offline"] or not online
        if not self.comet_offline and "COMET_API_KEY" not in os.environ:
            say("Comet is off: set COMET_API_KEY, or use --comet-offline without an account")
            return

        os.environ.setdefault("COMET_LOGGING_CONSOLE", "CRITICAL")
        import comet_ml

        try:
            config = comet_ml.ExperimentConfig(
                name=self.flags["experiment_name"],
                offline_directory=str(self.run_dir / "comet"),
                display_summary_level=0,
                **dict.fromkeys(COMET_AUTOMATIC, False),
            )
            self.comet = comet_ml.start(
                project_name=self.flags["comet_project_name"],
                workspace=self.flags["comet_workspace"],
                experiment_key=self.comet_key,
                online=not self.comet_offline,
                experiment_config=config,
            )
            self.comet.log_parameters(self.flags | self.facts)
        except Exception as error:
            say(f"Comet cannot be reached, training goes on without it: {error!r:.120}")

    def lap(self, phase):
        """Ends a phase of the step: the time since the last lap belongs to it.

        GPUs work asynchronously, so there a lap is an event in the stream of the GPU."""
        if self.on_gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        self.laps.append((phase, now))

    def times(self):
        """Milliseconds per step in each phase since the last call, as metrics.

        The phase "outside" (evaluation, checkpoints) is not part of a step."""
        if self.on_gpu:
            self.laps[-1][1].synchronize()

        milliseconds = Counter()
        for (_, before), (phase, now) in itertools.pairwise(self.laps):
            elapsed = before.elapsed_time(now) if self.on_gpu else 1000 * (now - before)
            milliseconds[phase] += elapsed
        steps = sum(phase == "update" for phase, _ in self.laps[1:])
        self.laps = self.laps[-1:]

        del milliseconds["outside"]
        milliseconds["total"] = milliseconds.total()
        return {f"time/{phase}_ms": ms / steps for phase, ms in milliseconds.items()}

    def step(self, step, metrics):
        """Logs an optimizer step. `metrics` is empty but for the steps that are to be logged."""
        self.bar.update()
        if RANK > 0 or not metrics:
            return

        metrics = {"step": step, **metrics, **self.checkpoint_metrics}
        self.checkpoint_metrics = {}
        if "loss" in metrics:
            tokens_per_step = self.flags["global_batch_size"] * self.flags["seq_length"]
            tokens_per_second = 1000 * tokens_per_step / metrics["time/total_ms"]
            metrics["tokens_seen"] = step * tokens_per_step
            metrics["tokens_per_second"] = tokens_per_second
            # Model FLOPs utilization: the share of the devices' peak that the model's own
            # arithmetic takes (PaLM, arXiv:2204.02311, appendix B).
            if self.facts["peak_flops"]:
                flops = tokens_per_second * self.facts["flops_per_token"]
                metrics["mfu"] = flops / (WORLD_SIZE * self.facts["peak_flops"])
            self.bar.set_postfix_str(f"loss {metrics['loss']:.3f}")

        columns = [f"step {step:>5}/{self.bar.total}"]
        for name, form in CONSOLE_FORMATS.items():
            if name in metrics:
                columns.append(f"{name} {metrics[name]:{form}}")
        say("  ".join(columns))
        if self.run_dir:
            self.write(step, metrics)

    def write(self, step, metrics):
        """Writes metrics to the run's folder and to Comet."""
        if shutil.disk_usage(self.run_dir).free < 2**20:
            fail(f"--save-dir {self.run_dir}: the disk is full")
        # JSON has neither NaN nor infinity. Both become null.
        finite = {k: v if abs(v) < float("inf") else None for k, v in metrics.items()}
        self.metrics_file.write(json.dumps(finite) + "\n")
        for name, number in metrics.items():
            self.board.add_scalar(name, number, step)
        if self.comet:
            self.comet.log_metrics(metrics, step=step)

    def after_checkpoint(self, metrics):
        """Adds the metrics of a checkpoint to the next line of the log.

        A kill would empty the archive that Comet has open when offline. So it is closed here and a
        new one is opened, at most every five minutes, because that takes a second."""
        self.checkpoint_metrics = metrics
        is_last = self.bar.n == self.bar.total
        is_due = time.monotonic() > self.next_archive and not is_last
        if self.comet and self.comet_offline and is_due:
            self.comet.end()
            self.open_comet()
            self.next_archive = time.monotonic() + 300

    def close(self):
        self.bar.close()
        if self.run_dir:
            self.board.close()
        if self.comet:
            self.comet.end()


def write_flags(path, flags):
    """Writes flags as command-line arguments, one a line: `train-llm.py @flags.txt` reads them."""
    lines = []
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            lines.append(flag)
        elif value is not None and value is not False:
            lines.append(shlex.join([flag, str(value)]))
    path.write_text("".join(f"{line}\n" for line in lines))


# Checkpoints. The tensors are in the format of torch.distributed.checkpoint (DCP). state.json holds
# everything else: plain values, size and CRC-32 checksum of each file, and its own checksum.


class CheckpointWriter(dcp.FileSystemWriter):
    """Writes a checkpoint that is either complete or not there: give it to DCP as storage writer.

    The files go to step-00000200.tmp. When all of them are on the disk, the folder is renamed to
    step-00000200. DCP calls the methods below in their order, on all ranks or on rank 0 only.
    `values` is a dict for JSON. The newest `keep` checkpoints of the run are kept."""

    def __init__(self, run_dir, step, values, keep):
        self.folder = run_dir / f"step-{step:08d}"
        self.values = {**values, "step": step}
        self.keep = keep
        self.start = time.perf_counter()
        self.save_ms = 0.0  # known on rank 0, when the checkpoint is complete
        super().__init__(self.folder.with_suffix(".tmp"))

    def prepare_global_plan(self, plans):
        """On rank 0, before anything is written: is there enough space?"""
        items = itertools.chain.from_iterable(plan.items for plan in plans)
        needed = sum(item.tensor_storage_size() or 0 for item in items)
        if shutil.disk_usage(self.folder.parent).free < 1.01 * needed + 2**20:
            raise OSError(f"it takes {needed:,}")
        return super().prepare_global_plan(plans)

    def write_data(self, plan, planner):
        """On all ranks: writes the files of this rank, and returns their checksums as well."""
        results = super().write_data(plan, planner).wait()
        names = {result.storage_data.relative_path for result in results}
        files = {name: size_and_crc(self.path / name) for name in names}
        future = torch.futures.Future()
        future.set_result((results, files))
        return future

    def finish(self, metadata, results):
        """On rank 0, when all ranks have written: completes, renames, and removes old ones."""
        super().finish(metadata, [writes for writes, _ in results])  # writes .metadata
        files = {".metadata": size_and_crc(self.path / ".metadata")}
        for _, files_of_a_rank in results:
            files.update(files_of_a_rank)

        values = {**self.values, "files": files}
        values["crc32"] = zlib.crc32(json.dumps(values).encode())
        (self.path / "state.json").write_text(json.dumps(values))
        flush(self.path / "state.json")
        flush(self.path)
        self.path.rename(self.folder)
        flush(self.folder.parent)

        for old, _ in list(checkpoints(self.folder.parent))[self.keep :]:
            shutil.rmtree(old.rename(old.with_suffix(".old")))
        self.save_ms = 1000 * (time.perf_counter() - self.start)

    def fail(self, error):
        """Ends the run in one line because of DCP's CheckpointException."""
        shutil.rmtree(self.path, ignore_errors=True)
        cause, _ = next(iter(error.failures.values()))  # of the first rank that failed
        free = shutil.disk_usage(self.folder.parent).free
        place = f"--save-dir {self.folder.parent}: {self.folder.name}"
        fail(f"{place} not saved, {free:,} bytes are free: {cause}")


def save_checkpoint(run_dir, step, model, optimizer, values, keep):
    """Saves model, optimizer and `values`, see `CheckpointWriter`. Returns metrics.

    If the disk is full, the run ends in one line, and earlier checkpoints stay as they are."""
    writer = CheckpointWriter(run_dir, step, values, keep)
    try:
        dcp.save(checkpoint_tensors(model, optimizer), storage_writer=writer)
    except dcp.api.CheckpointException as error:
        writer.fail(error)
    # The training loop waits (stalls) for all of it.
    return {"checkpoint/save_ms": writer.save_ms, "checkpoint/stall_ms": writer.save_ms}


def checkpoint_tensors(model, optimizer):
    """What this rank has of a checkpoint's tensors, under names that do not depend on the rung.

    Hyperparameters of the optimizer are left out: those of the flags hold."""
    model_state, optimizer_state = dcp_state.get_state_dict(model, optimizer)
    return {"model": model_state, "moments": optimizer_state["state"]}


def load_checkpoint(run_dir, model, optimizer):
    """Loads the newest intact checkpoint. Returns its plain values, {"step": 0} without one."""
    if RANK == 0:
        # What a kill left of a save, or of the removal of an old checkpoint: .tmp and .old.
        for leftover in run_dir.glob("step-????????.[!d]*"):
            shutil.rmtree(leftover)

    folder, values = newest_intact(run_dir)
    if folder is None:
        return {"step": 0}
    tensors = checkpoint_tensors(model, optimizer)
    try:
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder))
    except dcp.api.CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        fail(f"{folder} does not fit this model: {cause}")
    except (RuntimeError, ValueError) as error:
        fail(f"{folder} does not fit this model: {error}")

    optimizer_state = dcp_state.get_optimizer_state_dict(model, optimizer)
    optimizer_state["state"] = tensors["moments"]
    dcp_state.set_optimizer_state_dict(model, optimizer, optimizer_state)
    dcp_state.set_model_state_dict(model, tensors["model"])
    say(f"resumed from {folder}")
    return values


def newest_intact(run_dir):
    """Folder and plain values of the newest intact checkpoint, (None, None) if there is none.

    A damaged one is named and renamed. All ranks look at the list of rank 0."""
    for folder, values in all_gather_object(list(checkpoints(run_dir)))[0]:
        damaged = damaged_files(folder, values)
        if not damaged:
            return folder, values
        names = ", ".join(damaged)
        say(f"{folder} is damaged ({names}): renamed .damaged, the one before is taken")
        if RANK == 0:
            shutil.rmtree(folder.with_suffix(".damaged"), ignore_errors=True)
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
    """Yields folder and plain values of each checkpoint, newest first. None for damaged values."""
    for folder in sorted(run_dir.glob("step-????????"), reverse=True):
        try:
            values = json.loads((folder / "state.json").read_text())
            intact = values.pop("crc32") == zlib.crc32(json.dumps(values).encode())
        except (OSError, ValueError, KeyError, AttributeError):
            intact = False
        yield folder, values if intact else None


def all_gather_object(value):
    """The values of all ranks, in a list in the order of ranks. Every rank gets it."""
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
    """Waits until a file, or the list of names of a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def save_final_model(run_dir, step, model, config, tokenizer):
    """Writes weights (fp32) and tokenizer to `run_dir`/final_model, for `from_pretrained`."""
    options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dcp_state.get_model_state_dict(model, options=options)
    problem = None
    if RANK == 0:
        try:
            write_final_model(run_dir, step, weights, config, tokenizer)
        except Exception as error:
            problem = f"--save-dir {run_dir}: final_model was not written: {error}"
    if problem := all_gather_object(problem)[0]:
        fail(problem)


def write_final_model(run_dir, step, weights, config, tokenizer):
    """Writes the model to final_model.tmp, which replaces final_model when it is complete."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Tied weights have several names in `weights`, and one in the file.
    names = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    weights = {name: weight for name, weight in weights.items() if name in names}

    transformers.utils.logging.disable_progress_bar()
    temporary = run_dir / "final_model.tmp"
    model.save_pretrained(temporary, state_dict=weights)
    tokenizer.save_pretrained(temporary)
    # Settings of `generate` that came with pretrained weights, if there are any.
    with contextlib.suppress(OSError, ValueError):
        generation = transformers.GenerationConfig.from_pretrained(config.name_or_path)
        generation.to_json_file(temporary / "generation_config.json")
    # An empty file tells which step's model this is.
    (temporary / f"step-{step:08d}").touch()

    shutil.rmtree(run_dir / "final_model", ignore_errors=True)
    temporary.rename(run_dir / "final_model")

"""Logging and checkpoints: the one module that all stages share.

Only rank 0 logs. The functions that save and load checkpoints must be called by every rank.
"""

import fcntl
import itertools
import json
import os
import resource
import shutil
import sys
import time
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.tensor import DTensor
from tqdm import tqdm

# torchrun starts several processes and numbers them: these are their ranks, on all machines and on
# their own machine, and how many there are. Without torchrun there is one process, rank 0 of 1.
RANK = int(os.environ.get("RANK", 0))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))

# The stage of the course, which is the name of the script's folder, such as 01-single-gpu.
STAGE = Path(sys.argv[0]).resolve().parent.name

# Features of Comet that are turned off: it would send the code, and metrics and flags twice.
COMET_OFF = ("log_code", "log_git_patch", "log_graph", "parse_args", "auto_output_logging")
COMET_OFF += ("auto_metric_logging", "auto_param_logging")
# torch.distributed.checkpoint (DCP) warns if there is one process and no process group.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def say(message):
    """Prints a line on rank 0, above the progress bar."""
    if RANK == 0:
        with suppress(OSError):  # such as a terminal that was closed
            tqdm.write(message)
            sys.stdout.flush()


def fail(message):
    """Ends the run with one line, for errors that the user can fix.

    Usually all ranks fail for the same reason. The first one of a machine reports it, and then
    torchrun stops the others, which wait for that."""
    if LOCAL_RANK > 0:
        time.sleep(60)
    sys.exit(f"{Path(sys.argv[0]).name}: error: {message}")


def open_run_dir(run_dir):
    """Creates the folder of a run, and ends this run if another process trains there.

    Also removes incomplete checkpoints that a killed run has left."""
    if RANK > 0:
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT)  # open until the process ends
    for second in range(120):  # an NFS server keeps the lock of a lost machine for about 90 s
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if second == 0:
                say(f"another process trains in {run_dir}: waiting two minutes for its end")
            time.sleep(1)
        except OSError:  # no locks on this file system
            say(f"{run_dir} cannot be locked: start only one run there")
            break
    else:
        fail(f"-e {run_dir.name}: another process trains in {run_dir}")
    for leftover in run_dir.glob("step-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def flops_per_token(model, seq_length):
    """Operations per token, forward and backward: 6 N + 12 L Q T (PaLM, arXiv:2204.02311, app. B).

    N parameters that compute, L blocks, Q elements of a token's queries, T tokens. 0 for a mixture
    of experts, and for a config without these sizes: a number for the log never ends a run."""
    if any(".experts." in name for name, _ in model.named_parameters()):
        return 0
    try:
        embeddings = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
        embeddings.discard(model.get_output_embeddings().weight)  # computes, also if it is both
        num_parameters = model.num_parameters() - sum(weight.numel() for weight in embeddings)
        heads = model.config.num_attention_heads
        width = heads * (getattr(model.config, "head_dim", 0) or model.config.hidden_size // heads)
        return 6 * num_parameters + 12 * model.config.num_hidden_layers * width * seq_length
    except Exception:
        return 0


def memory_gb(model, optimizer, device):
    """Memory of the rank that uses most, in GB (1e9 bytes), as metrics. All ranks must call it.

    "state" is parameters, gradients and moments. "peak" is that since the last call or, without a
    GPU, that of the whole process."""
    tensors = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
    tensors += [t for state in optimizer.state.values() for t in state.values()]
    # Of a DTensor, a tensor that is spread over ranks, this rank holds a part.
    state = sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)

    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    else:
        unit = 1 if sys.platform == "darwin" else 1024  # bytes
        peak = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = torch.tensor([peak, state], dtype=torch.float64, device=device) / 1e9
    if dist.is_initialized():
        dist.all_reduce(memory, dist.ReduceOp.MAX)
    return dict(zip(("memory/peak_gb", "memory/state_gb"), memory.tolist(), strict=True))


class RunLog:
    """Logs a run to the console and, if it has a folder, to metrics.jsonl, TensorBoard and Comet.

    The run continues after `last_step`, in the Comet experiment `comet_key` if there is one."""

    def __init__(self, run_dir, last_step, total_steps, comet_key, flags, flops_per_token):
        self.run_dir = run_dir if RANK == 0 else None
        self.last_step = last_step
        self.total_steps = total_steps
        self.tokens_per_step = flags["global_batch_size"] * flags["seq_length"]
        self.flops_per_token = flops_per_token
        self.on_gpu = flags["device"] == "cuda"
        self.comet = None
        self.comet_key = comet_key or os.urandom(16).hex()
        # With None, the bar is shown on a terminal only.
        self.bar = tqdm(initial=last_step, total=total_steps, disable=RANK > 0 or None)
        if self.run_dir:
            self.open_files()
            self.open_comet(flags)
        else:
            say("this run is not saved: -e NAME saves it, and then the same command resumes it")
        self.laps = []
        self.lap("outside")

    def open_files(self):
        """Opens the run's files, and removes what was logged after the step it continues from."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        lines = [line for line in lines if line.endswith("}")]  # a kill may cut the last one
        kept = [line for line in lines if json.loads(line)["step"] <= self.last_step]
        path.with_suffix(".tmp").write_text("".join(f"{line}\n" for line in kept))
        path.with_suffix(".tmp").replace(path)
        self.metrics_file = path.open("a", buffering=1)

        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        # TensorBoard shows the path of a folder as the name of the run.
        folder = self.run_dir / "tensorboard" / STAGE
        self.board = SummaryWriter(folder, purge_step=self.last_step + 1)

    def open_comet(self, flags):
        """Starts or continues the Comet experiment. Whatever goes wrong, training goes on."""
        online = not flags["comet_offline"]
        if online and not os.environ.get("COMET_API_KEY"):  # Comet would ask for one
            say("Comet is off: set COMET_API_KEY, or use --comet-offline without an account")
            return
        os.environ.setdefault("COMET_LOGGING_CONSOLE", "CRITICAL")
        try:
            import comet_ml

            config = comet_ml.ExperimentConfig(
                name=flags["experiment_name"],
                tags=[STAGE, Path(flags["model_name"]).name, Path(flags["dataset_name"]).name],
                offline_directory=str(self.run_dir / "comet"),
                display_summary_level=0,
                **dict.fromkeys(COMET_OFF, False),
            )
            self.comet = comet_ml.start(
                project_name=flags["comet_project_name"],
                workspace=flags["comet_workspace"],
                experiment_key=self.comet_key,
                online=online,
                experiment_config=config,
            )
            self.comet.log_parameters({**flags, "world_size": WORLD_SIZE})
            if online:
                (self.run_dir / "comet.txt").write_text(f"{self.comet.url}\n")  # for compare.py
        except Exception as error:
            say(f"Comet could not be started, training goes on without it: {error!r:.120}")

    def lap(self, phase):
        """Ends a phase of the step: the time since the last lap belongs to it.

        A GPU works asynchronously, so there time is measured with CUDA events."""
        now = torch.cuda.Event(enable_timing=True) if self.on_gpu else time.perf_counter()
        if self.on_gpu:
            now.record()
        self.laps.append((phase, now))

    def pop_times(self):
        """Milliseconds per step in each phase since the last call, and the speed, as metrics.

        The phase "outside" (evaluation, checkpoints) is not part of a step."""
        if self.on_gpu:
            self.laps[-1][1].synchronize()
        times = Counter()
        for (_, before), (phase, now) in itertools.pairwise(self.laps):
            times[phase] += before.elapsed_time(now) if self.on_gpu else 1000 * (now - before)
        steps = sum(phase == "update" for phase, _ in self.laps[1:])  # a step has one of these
        self.laps = self.laps[-1:]

        del times["outside"]
        times["total"] = times.total()
        speed = 1000 * self.tokens_per_step * steps / times["total"]
        metrics = {"throughput/tokens_per_second": speed}
        if self.flops_per_token:
            flops = speed * self.flops_per_token / WORLD_SIZE
            metrics["throughput/tflops_per_device"] = flops / 1e12
        return metrics | {f"time/{phase}_ms": ms / steps for phase, ms in times.items()}

    def step(self, step, metrics):
        """Logs metrics of an optimizer step. They are empty in steps that are not logged."""
        self.last_step = step
        self.bar.update(step - self.bar.n)
        if RANK > 0 or not metrics:
            return
        columns = [f"step {step:>5}/{self.total_steps}"]
        for name, value in metrics.items():
            if name.startswith(("train/", "eval/", "throughput/")):
                short_name = name.removeprefix("train/").removeprefix("throughput/")
                columns.append(f"{short_name} {value:{',.0f' if value >= 1000 else '.5g'}}")
        say("  ".join(columns))

        if self.run_dir:
            try:
                self.metrics_file.write(json.dumps({"step": step, **metrics}) + "\n")
                for name, value in metrics.items():
                    self.board.add_scalar(name, value, step)
            except OSError as error:  # such as a full disk
                say(f"metrics cannot be written, training goes on: {error}")
        if self.comet:
            self.comet.log_metrics(metrics, step=step)

    def close(self):
        """Closes the files, and sends what Comet still holds."""
        self.bar.close()
        if self.run_dir:
            with suppress(OSError):
                self.board.close()
            say(f"the run: {self.run_dir}")
        if self.comet:
            self.comet.end()
            say(f"Comet: {self.comet.url or f'comet upload {self.run_dir}/comet/*.zip'}")


# Checkpoints. A checkpoint is a folder, such as step-00000200. Tensors are saved by
# torch.distributed.checkpoint (DCP), whose files can be loaded with any number of ranks, and
# everything else in state.json. While a folder is written or removed, its name ends in .tmp.


def save_checkpoint(run_dir, step, model, optimizer, values, keep):
    """Saves model, optimizer and the dict `values`, and keeps the newest `keep` checkpoints."""
    folder = run_dir / f"step-{step:08d}"
    dcp.save(checkpoint_tensors(model, optimizer), checkpoint_id=folder.with_suffix(".tmp"))
    if RANK == 0:
        complete_checkpoint(folder, {**values, "step": step}, keep)


def complete_checkpoint(folder, values, keep):
    """Gives a checkpoint its name, when all ranks have written their files. Removes old ones."""
    temporary = folder.with_suffix(".tmp")
    with (temporary / "state.json").open("w") as file:
        json.dump(values, file)
        file.flush()
        os.fsync(file.fileno())  # all must be on the disk before the folder gets its name
    temporary.rename(folder)
    for old in checkpoints(folder.parent)[keep:]:
        shutil.rmtree(old.rename(old.with_suffix(".tmp")), ignore_errors=True)


def checkpoints(run_dir):
    """The folders of the complete checkpoints, newest first."""
    return sorted(run_dir.glob("step-????????"), reverse=True)


def checkpoint_tensors(model, optimizer):
    """This rank's part of the tensors in a checkpoint, under names that are the same in all stages.

    Hyperparameters of the optimizer are not among them: they come from the flags."""
    model_state, optimizer_state = dcp_state.get_state_dict(model, optimizer)
    return {"model": model_state, "moments": optimizer_state["state"]}


def load_checkpoint(run_dir, model, optimizer, experiment, flags):
    """Loads the newest checkpoint of a run. Returns its `values`, {"step": 0} if there is none.

    Ends the run if its `experiment` differs, or if that or the flags differ between ranks. Flags
    that differ from those of the checkpoint are printed."""
    # Rank 0 alone chooses the checkpoint. If each rank did, a rank that does not see the newest one
    # yet, on a network file system, would go on from an older step than the others.
    newest = next(iter(checkpoints(run_dir)), None) if run_dir and RANK == 0 else None
    of_ranks = [(newest, {**flags, **experiment})] * WORLD_SIZE
    if dist.is_initialized():
        dist.all_gather_object(of_ranks, of_ranks[0])
    folder, ours = of_ranks[0]
    for rank, (_, theirs) in enumerate(of_ranks):
        check_same(ours, theirs, f"on rank {rank}: give all ranks the same flags and files")
    if folder is None:
        return {"step": 0}
    values = json.loads((folder / "state.json").read_text())
    check_same(experiment, values["experiment"], f"in {folder}: use another -e for another run")

    # To create Adam's moments, `get_state_dict` makes a step with gradients of 0. What is loaded
    # replaces them, and the step counter. A new run has nothing to load, and has returned above.
    model_state, optimizer_state = dcp_state.get_state_dict(model, optimizer)
    moments = optimizer_state["state"]
    # A parameter without a gradient had no moments, and another optimizer has others.
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    is_saved = {n: all(f"moments.{n}.{key}" in saved for key in moments[n]) for n in moments}
    optimizer_state["state"] = moments = {n: moments[n] for n in moments if is_saved[n]}
    dcp.load({"model": model_state, "moments": moments}, checkpoint_id=folder)
    states = {"model_state_dict": model_state, "optim_state_dict": optimizer_state}
    options = dcp_state.StateDictOptions(strict=False)  # there need not be moments for all
    dcp_state.set_state_dict(model, optimizer, **states, options=options)
    say(f"resumed from {folder}")
    if len(moments) < len(is_saved):
        say(f"the moments of {len(is_saved) - len(moments)} parameters begin anew")
    for name, value in flags.items():
        if values["flags"].get(name, value) != value:
            say(f"{name}: {values['flags'][name]} → {value}")
    return values


def check_same(ours, theirs, where):
    """Ends the run if two dicts have different values for the same name, and says which.

    A name of the config may be missing: versions of transformers add and remove some."""
    for name, value in ours.items():
        other = theirs.get(name, value if name.startswith("config.") else None)
        if other != value:
            fail(f"{name} is {value}, but {other} {where}")


def save_final_model(run_dir, model, tokenizer, dtype):
    """Writes weights as `dtype` and tokenizer to `run_dir`/final_model, for `from_pretrained`.

    All ranks must call it. Rank 0 gathers the whole model in the memory of its CPU."""
    options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dcp_state.get_model_state_dict(model, options=options)
    if RANK > 0:
        return
    model = getattr(model, "module", model)  # DDP wraps the model
    for name in model.all_tied_weights_keys:  # second names, such as that of the output layer
        weights.pop(name, None)
    kept = model._keep_in_fp32_modules_strict  # such as the bias of a router; no public name
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not any(part in name for part in kept):
            weights[name] = tensor.to(dtype)

    # Generation stops where the tokenizer says, and at the model's own special tokens for that.
    ends = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    special = tokenizer.added_tokens_decoder.keys()
    model.generation_config.eos_token_id = sorted(ends & special) or None

    folder = run_dir / "final_model"
    shutil.rmtree(folder, ignore_errors=True)  # a kill must not leave old and new files together
    model.save_pretrained(folder, state_dict=weights)
    model.config.dtype = dtype  # save_pretrained has written that of the training
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    say(f"exported in {str(dtype).removeprefix('torch.')}: {folder}")

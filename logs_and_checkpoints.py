"""Logging and checkpoints: the one module that all stages share.

Only rank 0 logs. The functions that save and load checkpoints must be called by every rank.
"""

import copy
import fcntl
import itertools
import json
import os
import re
import resource
import shlex
import shutil
import sys
import time
import warnings
from collections import Counter
from contextlib import contextmanager
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

# The names of the numbers that `memory_gb` returns.
MEMORY = ("current_allocated", "peak_allocated", "current_reserved", "peak_reserved", "state")
MEMORY_METRICS = [f"memory/{name}_gb" for name in MEMORY]
# What the console shows of the metrics, and how. metrics.jsonl has all of them.
CONSOLE = {"train/loss": ".4f", "train/learning_rate": ".2e", "train/grad_norm": ".3f"}
CONSOLE |= {"throughput/tokens_per_second": ",.0f", "throughput/mfu": ".1%"}
CONSOLE |= {"train/max_load_of_expert": ".2f", "train/max_load_of_rank": ".2f"}
CONSOLE |= {"eval/loss": ".4f", "eval/perplexity": ".2f"}
# Peak TFLOP/s of dense bf16 matrix products with fp32 accumulation (T4: fp16), from NVIDIA's data
# sheets and, for GeForce, white papers. The first pattern that is found in the device's name
# counts. $ is the end of the name: "RTX 4090 Laptop GPU" is another chip.
PEAK_TFLOPS = {"T4$": 65, "A10$": 125, "A10G": 70, "L4$": 121, "L40S": 362, "A100": 312}
PEAK_TFLOPS |= {"RTX 3090$": 71, "RTX 4090$": 165.2, "RTX 5090$": 209.5}
PEAK_TFLOPS |= {"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200 NVL": 835, "H200": 989}
PEAK_TFLOPS |= {"GB[23]00": 2500, "B[23]00": 2250}
# What configs call the number of experts in a mixture of experts, and of those that a token uses.
NUM_EXPERTS = "num_local_experts num_experts n_routed_experts moe_num_experts"
EXPERTS_PER_TOKEN = "num_experts_per_tok num_experts_per_token top_k_experts moe_topk moe_k"
# Features of Comet that are turned off.
COMET_OFF = ("log_code", "log_git_patch", "log_graph", "parse_args", "auto_output_logging")
COMET_OFF += ("auto_metric_logging", "auto_param_logging")
# torch.distributed.checkpoint (DCP) warns if there is one process and no process group.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def say(message):
    """Prints a line on rank 0, above the progress bar."""
    if RANK == 0:
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
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fail(f"-e {run_dir.name}: another process trains in {run_dir}")
    except OSError as error:  # some network file systems have no locks
        say(f"{run_dir} cannot be locked, start only one run there: {error}")
    for leftover in run_dir.glob("step-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def describe_run(model, seq_length, device):
    """What the log says of a run besides its flags."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    return {
        "parameters": model.num_parameters(),
        "attn": model.config._attn_implementation,
        "world_size": WORLD_SIZE,
        "device_name": name,
        "peak_flops": peak_flops(name),
        "flops_per_token": flops_per_token(model, seq_length),
    }


def peak_flops(device_name):
    """Peak FLOP/s of a device. 0 if it is unknown, or a part of a GPU (MIG)."""
    for pattern, tflops in PEAK_TFLOPS.items():
        if re.search(pattern, device_name) and "MIG" not in device_name:
            return tflops * 1e12
    return 0


def flops_per_token(model, seq_length):
    """Floating-point operations per token, forward and backward (PaLM, arXiv:2204.02311, app. B).

    6 N + 12 L H D T, for L layers, H heads of D dimensions, T tokens. N are the parameters that a
    token uses: of the embeddings those that are also the output layer, of the experts its own.
    """
    config = model.config
    embeddings = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    embeddings.discard(model.get_output_embeddings().weight)
    parameters = model.num_parameters() - sum(weight.numel() for weight in embeddings)

    num_experts = next(filter(None, (getattr(config, n, 0) for n in NUM_EXPERTS.split())), 1)
    used = next(filter(None, (getattr(config, n, 0) for n in EXPERTS_PER_TOKEN.split())), 1)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    parameters -= experts * (1 - used / num_experts)

    heads = getattr(config, "num_attention_heads", 0)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size / max(heads, 1)
    return 6 * parameters + 12 * config.num_hidden_layers * heads * head_dim * seq_length


def memory_gb(model, optimizer, device):
    """Memory of this rank in GB (1e9 bytes): a tensor on the device, (5,), see `MEMORY_METRICS`.

    "state" is parameters, gradients and optimizer state. Without a GPU the other numbers are the
    peak of the whole process."""
    tensors = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
    tensors += [t for state in optimizer.state.values() for t in state.values()]
    # Of a DTensor, a tensor that is spread over ranks, this rank holds a part.
    state = sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)

    if device.type == "cuda":
        memory = [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()]
        memory += [torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()]
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        memory = 4 * [unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]
    return torch.tensor([*memory, state], dtype=torch.float64, device=device) / 1e9


class RunLog:
    """Logs a run to the console and, if it has a folder, to metrics.jsonl, TensorBoard and Comet.

    The run continues after `last_step`, in the Comet experiment `comet_key` if there is one.
    `run_info` is what `describe_run` returns."""

    def __init__(self, run_dir, last_step, total_steps, comet_key, flags, run_info):
        self.run_dir = run_dir if RANK == 0 else None
        self.last_step = last_step
        self.total_steps = total_steps
        self.flags = flags
        self.run_info = run_info
        self.on_gpu = run_info["device_name"] != "CPU"
        self.comet = None
        self.comet_key = comet_key or os.urandom(16).hex()
        hidden = True if RANK > 0 else None  # None: the bar is shown on a terminal only
        self.bar = tqdm(initial=last_step, total=total_steps, unit="step", disable=hidden)
        if self.run_dir:
            self.open_files()
            self.open_comet()
        else:
            say("this run is not saved: -e NAME saves it, and then the same command resumes it")
        self.laps = []
        self.lap("outside")

    def open_files(self):
        """Opens the run's files, and removes what was logged after the step it continues from."""
        path = self.run_dir / "metrics.jsonl"
        kept = []
        for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
            is_whole = line.endswith("}\n")  # a kill may cut the last line
            if is_whole and json.loads(line)["step"] <= self.last_step:
                kept.append(line)
        path.with_suffix(".tmp").write_text("".join(kept))
        path.with_suffix(".tmp").replace(path)
        self.metrics_file = path.open("a", buffering=1)

        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        # TensorBoard shows the path of a folder as the name of the run.
        folder = self.run_dir / "tensorboard" / STAGE
        self.board = SummaryWriter(folder, purge_step=self.last_step + 1)

    def open_comet(self):
        """Starts or continues the Comet experiment. Whatever goes wrong, training goes on."""
        offline = self.flags["comet_offline"]
        has_config = Path("~/.comet.config").expanduser().exists()  # `comet init` writes it
        if not (offline or "COMET_API_KEY" in os.environ or has_config):
            say("Comet is off: set COMET_API_KEY, or use --comet-offline without an account")
            return
        # A server that does not answer delays the start by two requests of 10 s, not by minutes.
        os.environ.setdefault("COMET_HTTP_SESSION_RETRY_TOTAL", "1")
        os.environ.setdefault("COMET_GET_OR_ADD_EXPERIMENT_RETRY_TOTAL", "1")
        os.environ.setdefault("COMET_LOGGING_CONSOLE", "CRITICAL")
        try:
            import comet_ml

            if not offline and not comet_ml.get_config("comet.api_key"):
                raise ValueError("there is no API key")  # Comet would ask for one
            config = comet_ml.ExperimentConfig(
                name=self.flags["experiment_name"],
                offline_directory=str(self.run_dir / "comet"),
                display_summary_level=0,
                # Otherwise Comet would send the code, and metrics and flags a second time.
                **dict.fromkeys(COMET_OFF, False),
            )
            comet = comet_ml.start(
                project_name=self.flags["comet_project_name"],
                workspace=self.flags["comet_workspace"],
                experiment_key=self.comet_key,
                online=not offline,
                experiment_config=config,
            )
            parameters = {**self.flags, **self.run_info, "total_steps": self.total_steps}
            comet.log_parameters(parameters)
            comet.log_other("command", shlex.join(sys.argv))
            comet.add_tags([STAGE, self.flags["model_name"], self.flags["dataset_name"]])
            if not offline:
                (self.run_dir / "comet.txt").write_text(f"{comet.url}\n")
            self.comet = comet
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
        """Milliseconds per step in each phase since the last call, as metrics.

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
        return {f"time/{phase}_ms": ms / steps for phase, ms in times.items()}

    def step(self, step, metrics):
        """Logs metrics of an optimizer step. They are empty in steps that are not logged."""
        self.last_step = step
        self.bar.update(step - self.bar.n)
        if metrics and self.on_gpu:
            torch.cuda.reset_peak_memory_stats()  # a line has the peak since the line before it
        if RANK > 0 or not metrics:
            return

        metrics = dict(metrics)
        if "train/loss" in metrics:  # it is not in an evaluation
            tokens_per_step = self.flags["global_batch_size"] * self.flags["seq_length"]
            tokens_per_second = 1000 * tokens_per_step / metrics["time/total_ms"]
            metrics["train/tokens_seen"] = step * tokens_per_step
            metrics["throughput/tokens_per_second"] = tokens_per_second
            # Model FLOPs utilization: the model's own arithmetic as a share of the devices' peak.
            if peak := WORLD_SIZE * self.run_info["peak_flops"]:
                flops = tokens_per_second * self.run_info["flops_per_token"]
                metrics["throughput/mfu"] = flops / peak
            self.bar.set_postfix_str(f"loss {metrics['train/loss']:.3f}")

        columns = [f"step {step:>5}/{self.total_steps}"]
        for name, form in CONSOLE.items():
            if name in metrics:
                short_name = name.removeprefix("train/").removeprefix("throughput/")
                columns.append(f"{short_name} {metrics[name]:{form}}")
        say("  ".join(columns))

        if self.run_dir:
            # JSON has neither NaN nor infinity. Both become null.
            finite = {k: v if abs(v) < float("inf") else None for k, v in metrics.items()}
            self.metrics_file.write(json.dumps({"step": step, **finite}) + "\n")
            for name, number in metrics.items():
                self.board.add_scalar(name, number, step)
        if self.comet:
            self.comet.log_metrics(metrics, step=step)

    def close(self):
        """Closes the files, sends what Comet still holds, and says where all of it is."""
        self.bar.close()
        if self.run_dir:
            self.board.close()
            say(f"the run: {self.run_dir}")
        if self.comet:
            self.comet.end()
            upload = f"comet upload {self.run_dir}/comet/*.zip"
            say(f"the run on Comet: {upload if self.flags['comet_offline'] else self.comet.url}")


# Checkpoints. A checkpoint is a folder, such as step-00000200. Tensors are saved by
# torch.distributed.checkpoint (DCP), whose files can be loaded with any number of ranks, and
# everything else in state.json. While a folder is written or removed, its name ends in .tmp.


def save_checkpoint(run_dir, step, model, optimizer, values, keep):
    """Saves model, optimizer and the dict `values`, and keeps the newest `keep` checkpoints."""
    writer = CheckpointWriter(run_dir, step, values, keep)
    dcp.save(checkpoint_tensors(model, optimizer), storage_writer=writer)


class CheckpointWriter(dcp.FileSystemWriter):
    """Writes the files of a checkpoint in a temporary folder, which is renamed when it is complete.

    `finish` does that, so it also works if DCP saves in a thread."""

    def __init__(self, run_dir, step, values, keep, **options):
        self.folder = run_dir / f"step-{step:08d}"
        self.temporary = self.folder.with_suffix(".tmp")
        self.values = {**values, "step": step}
        self.keep = keep
        super().__init__(self.temporary, **options)

    def write_data(self, plan, planner):
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise OSError(f"{self.folder} cannot be written, is the disk full? {error}") from error

    def finish(self, metadata, results):
        """DCP calls this on rank 0, when all ranks have written their files to the disk."""
        super().finish(metadata, results)
        with (self.temporary / "state.json").open("w") as file:
            json.dump(self.values, file)
            file.flush()
            os.fsync(file.fileno())  # all must be on the disk before the folder gets its name
        self.temporary.rename(self.folder)
        for old in checkpoints(self.folder.parent)[self.keep :]:
            try:
                shutil.rmtree(old.rename(old.with_suffix(".tmp")))
            except OSError as error:  # another user's file, or one that is open on another machine
                say(f"{old} cannot be removed: {error}")


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

    Ends the run if its `experiment` is another one. Other flags may differ, which is printed."""
    # Rank 0 alone chooses the checkpoint. If each rank did, a rank that does not see the newest one
    # yet, on a network file system, would go on from an older step than the others.
    found = [None, None]
    if run_dir and RANK == 0 and checkpoints(run_dir):
        folder = checkpoints(run_dir)[0]
        with one_line_if_damaged(folder):
            values = json.loads((folder / "state.json").read_text())
        export = run_dir / "final_model"
        # An older one was exported before the run went on, with a raised --max-steps for example.
        is_new = export.exists() and export.stat().st_mtime >= folder.stat().st_mtime
        found = [folder, {**values, "is_exported": is_new}]
    if dist.is_initialized():
        dist.broadcast_object_list(found)  # replaces the items of the list on other ranks
    folder, values = found
    if folder is None:
        return {"step": 0}
    check_same(experiment, values["experiment"], f"in the run in {run_dir}")

    # To create Adam's moments, `get_state_dict` makes a step with gradients of 0. What is loaded
    # replaces them, and the step counter. A new run has nothing to load, and has returned above.
    model_state, optimizer_state = dcp_state.get_state_dict(model, optimizer)
    moments = optimizer_state["state"]
    with one_line_if_damaged(folder):
        # A parameter that has had no gradient yet has no moments in the checkpoint.
        saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        moments = {name: moments[name] for name in moments if f"moments.{name}.step" in saved}
        dcp.load({"model": model_state, "moments": moments}, checkpoint_id=folder)
    optimizer_state["state"] = moments
    options = dcp_state.StateDictOptions(strict=False)  # there need not be moments for all
    states = {"model_state_dict": model_state, "optim_state_dict": optimizer_state}
    dcp_state.set_state_dict(model, optimizer, **states, options=options)
    say(f"resumed from {folder}")
    for name, value in flags.items():
        if values["flags"].get(name, value) != value:
            say(f"--{name.replace('_', '-')} {values['flags'][name]} → {value}")
    return values


@contextmanager
def one_line_if_damaged(folder):
    """Ends the run with one line if a file of a checkpoint cannot be read."""
    try:
        yield
    except (Exception, dcp.api.CheckpointException) as error:  # the latter is no Exception
        reason = f"{type(error).__name__}: {error}".splitlines()[-1]  # DCP's has tracebacks before
        advice = "try again, or remove this folder to resume from an earlier one"
        fail(f"{folder} cannot be loaded: {reason}; {advice}")


def check_same(ours, theirs, where):
    """Ends the run if two dicts have different values of the same name, and says which.

    A name that only one of them has makes no difference: versions of transformers add names to the
    config of a model, and remove them."""
    for name, value in ours.items():
        if theirs.get(name, value) != value:
            fail(f"{name} is {value}, but {theirs[name]} {where}")


def save_final_model(run_dir, model, tokenizer, dtype):
    """Writes weights (as `dtype`) and tokenizer to `run_dir`/final_model, for `from_pretrained`.

    All ranks must call it. Rank 0 gathers the whole model in the memory of its CPU."""
    options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dcp_state.get_model_state_dict(model, options=options)
    if RANK > 0:
        return
    model = getattr(model, "module", model)  # DDP wraps the model
    for name in model.all_tied_weights_keys:  # second names, such as that of the output layer
        weights.pop(name, None)
    for name, tensor in weights.items():
        weights[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor

    folder, temporary = run_dir / "final_model", run_dir / "final_model.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary, state_dict=weights)
    config = copy.deepcopy(model.config)
    config.dtype = dtype  # save_pretrained has written that of the model in training
    config.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)

    # Generation stops at the model's own tokens for that, and at the tokenizer's end of text, which
    # prepare.py may have changed. (After a change of tokenizer the former may be ordinary tokens.)
    generation = copy.deepcopy(model.generation_config)
    ends = generation.eos_token_id
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    generation.eos_token_id = sorted(ends & tokenizer.added_tokens_decoder.keys()) or None
    generation.save_pretrained(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    say(f"exported in {str(dtype).removeprefix('torch.')}: {folder}")

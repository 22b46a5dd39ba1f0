"""Logging and checkpoints: the one module that all stages share.

Logging happens on rank 0 only, and sends nothing between ranks: the script does that before it
logs. The functions that save and load checkpoints must be called by every rank.
"""

import fcntl
import itertools
import json
import os
import re
import resource
import shlex
import shutil
import sys
import textwrap
import time
import warnings
from collections import Counter
from pathlib import Path

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
# Peak FLOP/s of dense matrix products in bf16 (of a T4 in fp16) that are added up in fp32. The keys
# are searched for in the device's name, in this order, and $ is its end: "RTX 4090 Laptop GPU" is
# another chip. From NVIDIA's data sheets, of which some give twice the number, with sparsity, and
# for GeForce from appendix A of the white papers on Ampere GA102, Ada, and RTX Blackwell.
PEAK_FLOPS = {
    "T4$": 65e12,
    "A10$": 125e12,
    "A10G": 70e12,
    "RTX 3090$": 71e12,
    "RTX 4090$": 165.2e12,
    "RTX 5090$": 209.5e12,
    "L4$": 121e12,
    "L40S": 362e12,
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GB[23]00": 2500e12,
    "B[23]00": 2250e12,
}
# What configs call the number of experts in a mixture of experts, and of those that a token uses.
NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
EXPERTS_PER_TOKEN += ("moe_topk", "moe_k")
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
    """Ends the run with one line, for errors that the user can fix.

    Usually all ranks fail for the same reason. The first one of a machine reports it, and then
    torchrun stops the others. They wait 60 s and report it only if they still run then."""
    if LOCAL_RANK > 0:
        time.sleep(60)
    sys.exit(f"{Path(sys.argv[0]).name}: error: {message}")


def lock_run_dir(run_dir):
    """Creates the folder of a run, and ends the run if another one trains in it.

    Rank 0 locks the file `lock`. The system releases the lock when the process ends, also after
    kill -9. Some network file systems have no locks: there the run goes on without one."""
    if RANK > 0:
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT)  # it stays open
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fail(f"-e {run_dir.name}: another process trains in {run_dir}")
    except OSError as error:
        say(f"{run_dir} cannot be locked, start only one run there: {error}")


def describe_run(model, seq_length, device):
    """What the log says of a run besides its flags."""
    device_name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    return {
        "parameters": model.num_parameters(),
        "attn": model.config._attn_implementation,
        "flops_per_token": flops_per_token(model, seq_length),
        "device_name": device_name,
        "peak_flops": peak_flops(device_name),
    }


def flops_per_token(model, seq_length):
    """Floating-point operations per token, forward and backward: 6 N + 12 L H D T.

    N is the number of parameters that a token uses. Embeddings do not count, but for one that is
    also the output layer, and of the experts of a mixture those count to which a token is sent. The
    second term is attention without its causal mask: L layers, H heads of D dimensions,
    sequences of T tokens.
    Source: PaLM, arXiv:2204.02311, appendix B."""
    config = model.config
    embeddings = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    embeddings.discard(model.get_output_embeddings().weight)
    parameters = model.num_parameters() - sum(weight.numel() for weight in embeddings)

    sizes = [getattr(config, name, None) for name in NUM_EXPERTS]
    num_experts = next((size for size in sizes if isinstance(size, int)), 0)
    sizes = [getattr(config, name, None) for name in EXPERTS_PER_TOKEN]
    experts_per_token = next((size for size in sizes if isinstance(size, int)), 0)
    if 0 < experts_per_token < num_experts:
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameters -= parameter.numel() * (1 - experts_per_token / num_experts)

    heads = getattr(config, "num_attention_heads", 0)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size / max(heads, 1)
    return 6 * parameters + 12 * config.num_hidden_layers * heads * head_dim * seq_length


def peak_flops(device_name):
    """Peak FLOP/s of a device, or 0 if it is unknown: then MFU is not logged.

    That of a MIG instance, a part of a GPU, is unknown."""
    for pattern, peak in PEAK_FLOPS.items():
        if re.search(pattern, device_name) and "MIG" not in device_name:
            return peak
    return 0


def memory_gb(model, optimizer, device):
    """Memory of this rank in GB (1e9 bytes): a tensor, (5,) float64, see `MEMORY_METRICS`.

    It is on the device, where ranks can compare theirs. "state" is parameters, gradients and
    optimizer state. Without a GPU the other numbers are the memory of the whole process (its
    resident set)."""
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
    numbers = [*allocated, *reserved, state]
    return torch.tensor(numbers, dtype=torch.float64, device=device) / 1e9


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
        self.comet = None
        self.comet_key = comet_key or os.urandom(16).hex()
        self.bar = tqdm(initial=last_step, total=total_steps, unit="step", disable=RANK > 0 or None)

        if self.run_dir:
            self.open_files()
            self.open_comet()
        self.lap("outside")

    def open_files(self):
        """Opens the run's files, and removes what was logged after the step it continues from."""
        # The flags, each on a line of its own, as `train-llm.py @FILE` reads them.
        lines = []
        for name, value in self.flags.items():
            if value is not None and value is not False:
                setting = "" if value is True else f"={value}"
                lines.append(f"--{name.replace('_', '-')}{setting}\n")
        (self.run_dir / "flags.txt").write_text("".join(lines))

        path = self.run_dir / "metrics.jsonl"
        kept = []
        for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
            # A kill may cut the last line.
            if line.endswith("}\n") and json.loads(line)["step"] <= self.last_step:
                kept.append(line)
        path.with_suffix(".tmp").write_text("".join(kept))
        path.with_suffix(".tmp").replace(path)
        self.metrics_file = path.open("a", buffering=1)

        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        # TensorBoard shows the path of a folder as the name of the run.
        folder = self.run_dir / "tensorboard" / STAGE
        self.board = SummaryWriter(folder, purge_step=self.last_step + 1)
        self.board.add_text("command", f"    {shlex.join(sys.argv)}", self.last_step)

    def open_comet(self):
        """Starts or continues the Comet experiment. Whatever goes wrong, training goes on."""
        offline = self.flags["comet_offline"]
        # These are the places in which Comet looks for a key. To import Comet takes a second.
        files = [Path(".comet.config"), Path.home() / ".comet.config"]
        may_have_key = {"COMET_API_KEY", "COMET_CONFIG"} & os.environ.keys()
        if not (offline or may_have_key or any(file.exists() for file in files)):
            say("Comet is off: set COMET_API_KEY, or use --comet-offline without an account")
            return

        # A server that does not answer delays the start by two requests of 10 s, not by minutes.
        os.environ.setdefault("COMET_LOGGING_CONSOLE", "CRITICAL")
        os.environ.setdefault("COMET_HTTP_SESSION_RETRY_TOTAL", "1")
        os.environ.setdefault("COMET_GET_OR_ADD_EXPERIMENT_RETRY_TOTAL", "1")
        try:
            import comet_ml

            if not offline and not comet_ml.get_config("comet.api_key"):
                raise ValueError("there is no API key")
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
                online=not offline,
                experiment_config=config,
            )
            versions = {"torch": torch.__version__, "transformers": transformers.__version__}
            ours = {"stage": STAGE, "world_size": WORLD_SIZE, "total_steps": self.total_steps}
            self.comet.log_parameters({**self.flags, **ours, **versions, **self.run_info})
            self.comet.log_other("command", shlex.join(sys.argv))
            self.comet.add_tags([STAGE, self.flags["model_name"], self.flags["dataset_name"]])
            if not offline:  # for compare.py
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
        """Logs metrics of an optimizer step. They are empty in steps that are not logged."""
        self.last_step = step
        self.bar.update(step - self.bar.n)
        if metrics and self.on_gpu:
            torch.cuda.reset_peak_memory_stats()  # a peak is that of the steps since the last line
        if RANK > 0 or not metrics:
            return

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
            self.write(step, metrics)

    def write(self, step, metrics):
        """Writes metrics to the run's folder and to Comet."""
        # JSON has neither NaN nor infinity. Both become null.
        finite = {k: v if abs(v) < float("inf") else None for k, v in metrics.items()}
        self.metrics_file.write(json.dumps({"step": step, **finite}) + "\n")
        for name, number in metrics.items():
            self.board.add_scalar(name, number, step)
        if self.comet:
            self.comet.log_metrics(metrics, step=step)

    def sample(self, tokenizer, prompt, continuation):
        """Logs what the model has written after a prompt, both tokens, up to the end of a text."""
        continuation = continuation.tolist()
        if tokenizer.eos_token_id in continuation:
            continuation = continuation[: continuation.index(tokenizer.eos_token_id)]
        prompt, continuation = tokenizer.decode(prompt), tokenizer.decode(continuation)
        say(f"prompt, from text that the model was not trained on: {prompt}")
        say(f"what the model writes after it: {continuation}")
        if self.run_dir:
            text = f"prompt:\n{prompt}\n\nwhat the model writes after it:\n{continuation}"
            self.board.add_text("sample", textwrap.indent(text, "    "), self.last_step)
            if self.comet:
                self.comet.log_text(text, step=self.last_step)

    def close(self):
        """Closes the files, sends what Comet still holds, and says where all of it is."""
        self.bar.close()
        if self.run_dir:
            self.board.close()
            say(f"the run: {self.run_dir}")
        else:
            say("nothing was kept: with -e NAME a run is saved, and the same command resumes it")
        if self.comet:
            self.comet.end()
            if self.flags["comet_offline"]:
                say(f"to upload the run to Comet: comet upload {self.run_dir}/comet/*.zip")
            else:
                say(f"the run on Comet: {self.comet.url}")


# Checkpoints. A checkpoint is a folder, such as step-00000200. Tensors are saved by
# torch.distributed.checkpoint (DCP), whose files can be loaded with any number of ranks, and all
# else in state.json. While a folder is written or removed, its name ends in .tmp.


def save_checkpoint(run_dir, step, model, optimizer, values, keep):
    """Saves model, optimizer and the dict `values`, and keeps the newest `keep` checkpoints.

    If that fails, because the disk is full for example, earlier checkpoints stay as they are."""
    writer = CheckpointWriter(run_dir, step, values, keep)
    try:
        dcp.save(checkpoint_tensors(model, optimizer), storage_writer=writer)
    except dcp.api.CheckpointException as error:
        fail(f"--save-dir {run_dir}: step {step} was not saved: {cause_of(error)}")


class CheckpointWriter(dcp.FileSystemWriter):
    """Writes the files of a checkpoint, and then completes it: see `save_checkpoint`."""

    def __init__(self, run_dir, step, values, keep):
        self.folder = run_dir / f"step-{step:08d}"
        self.temporary = self.folder.with_suffix(".tmp")
        self.values = {**values, "step": step}
        self.keep = keep
        # Tensors are copied from the GPU one by one, without a CUDA stream. So this may also happen
        # in a thread, whose streams would belong to GPU 0.
        super().__init__(self.temporary, per_thread_copy_ahead=0)

    def finish(self, metadata, results):
        """DCP calls this on rank 0, when all ranks have written their files to the disk."""
        super().finish(metadata, results)
        state = self.temporary / "state.json"
        state.write_text(json.dumps(self.values))
        flush(state)
        flush(self.temporary)
        self.temporary.rename(self.folder)
        flush(self.folder.parent)
        for old in checkpoints(self.folder.parent)[self.keep :]:
            try:
                shutil.rmtree(old.rename(old.with_suffix(".tmp")))
            except OSError as error:  # another user's file, or one that is open on another machine
                say(f"{old} cannot be removed: {error}")


def checkpoint_tensors(model, optimizer):
    """This rank's part of the tensors in a checkpoint, under names that are the same in all stages.

    Hyperparameters of the optimizer are not among them: they come from the flags."""
    model_state, optimizer_state = dcp_state.get_state_dict(model, optimizer)
    return {"model": model_state, "moments": optimizer_state["state"]}


def load_checkpoint(run_dir, model, optimizer, experiment, flags):
    """Loads the newest checkpoint. Returns its `values`, {"step": 0} if there is none, and adds
    whether the run has exported its model ("is_exported").

    Ends the run if the checkpoint cannot be loaded, or if its `experiment`, a dict, is not the
    same. Other flags may differ, and those that do are printed."""
    # Rank 0 alone chooses the checkpoint. If each rank did, one of them that cannot see the newest
    # one for a moment would go on from an older step than the others.
    folder, values, names = from_rank_0(newest_checkpoint(run_dir) if RANK == 0 else None)
    if folder is None:
        return {"step": 0}
    check_same(experiment, values["experiment"], f"in the run in {run_dir}")

    # To create Adam's moments, this makes a step with gradients of 0. What is loaded replaces them.
    # In a new run that step would count, so this must not be called if nothing is loaded.
    tensors = checkpoint_tensors(model, optimizer)
    # Parameters that have had no gradient yet have no moments in the checkpoint.
    moments = tensors["moments"]
    tensors["moments"] = {k: moments[k] for k in moments if f"moments.{k}.step" in names}
    try:
        dcp.load(tensors, checkpoint_id=folder)
    except dcp.api.CheckpointException as error:
        fail_to_load(folder, cause_of(error))

    dcp_state.set_model_state_dict(model, tensors["model"])
    optimizer_state = dcp_state.get_optimizer_state_dict(model, optimizer)  # hyperparameters
    optimizer_state["state"] = tensors["moments"]
    options = dcp_state.StateDictOptions(strict=False)  # there need not be moments for all
    dcp_state.set_optimizer_state_dict(model, optimizer, optimizer_state, options=options)
    say(f"resumed from {folder}")
    for name, value in flags.items():
        if values["flags"].get(name, value) != value:
            say(f"--{name.replace('_', '-')} {values['flags'][name]} → {value}")
    return values


def newest_checkpoint(run_dir):
    """The folder of the newest checkpoint, its plain values, and the names of its tensors.

    All three are None if there is none. Removes what a kill has left of others."""
    for leftover in run_dir.glob("step-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    folders = checkpoints(run_dir)
    if not folders:
        return None, None, None
    try:
        values = json.loads((folders[0] / "state.json").read_text())
        metadata = dcp.FileSystemReader(folders[0]).read_metadata()
    except Exception as error:  # a file may hold anything
        fail_to_load(folders[0], error)
    values["is_exported"] = (run_dir / "final_model").exists()
    return folders[0], values, set(metadata.state_dict_metadata)


def fail_to_load(folder, error):
    """Ends the run because a checkpoint cannot be loaded, and says what to do."""
    advice = "try again, or remove this folder to resume from an earlier one"
    fail(f"{folder} cannot be loaded: {error!r}; {advice}")


def cause_of(error):
    """What went wrong on the first rank that failed: DCP's own text has a traceback for each."""
    return next(cause for cause, _ in error.failures.values())


def check_same(experiment, other, where):
    """Ends the run if the experiment, a dict, is not the same as another one, and says why.

    In it, the config of the model is a dict as well. Versions of transformers add keys to a config
    and remove keys from it, so a key that only one of two configs has makes no difference."""
    for name, value in experiment.items():
        other_value = other.get(name)
        keys_of_one = ()
        if isinstance(value, dict) and isinstance(other_value, dict):
            keys_of_one = sorted(value.keys() ^ other_value.keys())
            different = [k for k in value if k in other_value and value[k] != other_value[k]]
            value = {key: value[key] for key in different}
            other_value = {key: other_value[key] for key in different}
        if value != other_value:
            fail(f"{name} is {value}, but {other_value} {where}")
        if keys_of_one:
            say(f"{name}: another version of transformers? Not compared: {', '.join(keys_of_one)}")


def checkpoints(run_dir):
    """The folders of the complete checkpoints, newest first."""
    return sorted(run_dir.glob("step-????????"), reverse=True)


def from_rank_0(value):
    """The value that rank 0 has, on every rank."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def flush(path):
    """Waits until a file, or the list of entries of a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def save_final_model(run_dir, model, tokenizer, dtype):
    """Writes weights (as `dtype`) and tokenizer to `run_dir`/final_model, for `from_pretrained`.

    All ranks must call it. Rank 0 gathers the whole model in the memory of its CPU."""
    options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dcp_state.get_model_state_dict(model, options=options)
    if RANK == 0:
        model = getattr(model, "module", model)  # DDP wraps the model
        folder = run_dir / "final_model"
        temporary = folder.with_suffix(".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        # Tied weights have two names, such as those of the embeddings and of the output layer.
        for name in model.all_tied_weights_keys:
            weights.pop(name, None)
        for name, tensor in weights.items():
            if tensor.is_floating_point():
                weights[name] = tensor.to(dtype)
        model.save_pretrained(temporary, state_dict=weights)
        model.config.dtype = dtype  # save_pretrained has written that of the model in training
        model.config.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        # Generation stops at the model's own tokens for that, and at the tokenizer's end of text:
        # prepare.py may have made that the token which ends a turn in a chat. (A model that was
        # given another tokenizer may name tokens that are ordinary ones.)
        ends = model.generation_config.eos_token_id
        ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
        ends &= tokenizer.added_tokens_decoder.keys()
        model.generation_config.eos_token_id = sorted(ends) or None
        model.generation_config.save_pretrained(temporary)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)

"""Logging and checkpoints: the one module that the rungs share. Logging holds no collective, the
script reduces what it logs. The functions for checkpoints are called by all ranks.
A checkpoint is a folder, written as step-00000200.tmp, flushed to the disk, renamed: so complete.
Tensors are DCP's; state.json holds plain values, size and CRC-32 of each file, its own CRC-32."""

import contextlib
import json
import os
import resource
import shlex
import shutil
import signal
import sys
import tempfile
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

RANK, LOCAL_RANK = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
MEMORY = ("current_allocated", "peak_allocated", "current_reserved", "peak_reserved", "state")
MEMORY = tuple(f"memory/{name}_gb" for name in MEMORY)
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # DCP, in rung 01
CONSOLE = {"loss": ".4f", "learning_rate": ".2e", "grad_norm": ".3f", "tokens_per_second": ",.0f"}
CONSOLE |= {"mfu": ".1%", "eval/loss": ".4f", "eval/perplexity": ".2f"}
# Dense bf16 peak in FLOP/s by a part of the device's name. Source: NVIDIA's data sheets.
PEAK_FLOPS = {"A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
COMET_OFF = ("log_code", "log_graph", "log_git_metadata", "log_git_patch", "log_env_details")
COMET_OFF += ("parse_args", "auto_param_logging", "auto_metric_logging", "auto_output_logging")


def say(message):
    """Prints a line on rank 0, above the progress bar."""
    if RANK == 0:
        tqdm.write(message)
        sys.stdout.flush()


def fail(message):
    """Ends the run for a reason that its user can mend: one line per node, exit code 2.

    The ranks of a node meet the same error and the first reports it. The others wait for it: when
    one of them leaves, torchrun stops the rest, maybe before the first has spoken."""
    for _ in range(60 if LOCAL_RANK > 0 else 0):
        time.sleep(1)
        with contextlib.suppress(psutil.Error):  # of one that ends while it is looked at
            family = psutil.Process(os.getppid()).children()
            if "0" not in [process.environ().get("LOCAL_RANK") for process in family]:
                sys.exit(2)  # the first has spoken
    sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {message.strip().splitlines()[0]}\n")
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0:
        os.kill(os.getppid(), signal.SIGTERM)  # else torchrun would try, and fail, as often
    sys.exit(2)


def describe(model, seq_length, device):
    """What is known of a run beside its flags. The model must not be wrapped yet.

    FLOPs of a token, forward and backward: 6 N + 12 L H D T (PaLM, arXiv:2204.02311, appendix B), N
    without embeddings that are not the output layer too, attention without regard to its mask."""
    config, n = model.config, model.num_parameters()
    tables = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    tables -= {model.get_output_embeddings().weight}
    heads, head = getattr(config, "num_attention_heads", 0), vars(config).get("head_dim")
    width = heads * head if head else heads and config.hidden_size
    attention = 12 * config.num_hidden_layers * width * seq_length
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    facts = {"stage": Path(sys.argv[0]).resolve().parent.name, "world_size": WORLD_SIZE}
    facts |= {"torch": torch.__version__, "transformers": transformers.__version__}
    facts |= {"device_name": name, "parameters": n, "attention": config._attn_implementation}
    facts["flops_per_token"] = 6 * (n - sum(table.numel() for table in tables)) + attention
    peak = next((peak for key, peak in PEAK_FLOPS.items() if key in name), 0)
    return facts | {"peak_flops": peak * WORLD_SIZE}


def memory_gb(model, optimizer, device):
    """This rank's memory in GB (1e9 bytes): a CPU tensor, (5,) float64, in the order of `MEMORY`.
    The last: parameters, gradients, optimizer tensors. On a CPU the others are the resident set."""
    tensors = [tensor for p in model.parameters() for tensor in (p, p.grad) if tensor is not None]
    tensors += [tensor for moments in optimizer.state.values() for tensor in moments.values()]
    state = sum(t.to_local().nbytes if isinstance(t, DTensor) else t.nbytes for t in tensors)
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        reserved = torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()
    else:
        rss, unit = psutil.Process().memory_info().rss, 1 if sys.platform == "darwin" else 1024
        peak = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        allocated = reserved = rss, max(rss, peak)
    return torch.tensor([*allocated, *reserved, state], dtype=torch.float64) / 1e9


class RunLog:
    """A run's metrics: console, metrics.jsonl, TensorBoard, Comet. Only rank 0 writes them."""

    def __init__(self, run_dir, start, total_steps, comet_key, flags, facts):
        """Continues after step `start`, in Comet's experiment `comet_key` if there is one."""
        self.flags, self.facts, self.pending, self.archive_at = flags, facts, {}, 0
        self.comet, self.comet_key = None, comet_key or os.urandom(16).hex()
        self.cuda, self.laps = facts["device_name"] != "CPU", []
        self.run_dir = run_dir if RANK == 0 else None
        self.elastic = {"world_size": WORLD_SIZE, "restarts": 0, "steps_lost": 0}
        self.furthest, self.tries = start, 0  # starts since there was a step beyond the furthest
        if not run_dir and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0:
            fail("--experiment-name: a run without one leaves nothing that a restart could take up")
        self.bar = tqdm(initial=start, total=total_steps, unit="step", disable=RANK > 0 or None)
        if self.run_dir:
            try:
                self.open_files(start)
                self.take_up(start)
            except OSError as error:
                fail(f"--save-dir {run_dir}: {error}")
            self.open_comet()
        self.lap("outside")

    def open_files(self, start):
        """Leaves the flags for @flags.txt to repeat, cuts metrics.jsonl after step `start`."""
        lines = []
        for name, value in self.flags.items():
            words = [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
            lines += [shlex.join(words) + "\n"] if value is not None and value is not False else []
        (self.run_dir / "flags.txt").write_text("".join(lines))
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        lines = [x for x in lines if x.endswith("}\n") and json.loads(x)["step"] <= start]
        path.with_suffix(".tmp").write_text("".join(lines))
        self.file = path.with_suffix(".tmp").replace(path).open("a", buffering=1)
        from torch.utils.tensorboard import SummaryWriter  # a second to import, so only here

        self.board = SummaryWriter(self.run_dir / "tensorboard", purge_step=start + 1)

    def take_up(self, start):
        """Opens the file in which each step leaves its number, and says what a restart cost."""
        self.progress, step = os.open(self.run_dir / "progress", os.O_RDWR | os.O_CREAT), start
        if words := os.read(self.progress, 99).split():
            step, world, restarts, lost, self.furthest, self.tries = map(int, words)
            again = max(0, step - start)
            self.elastic |= {"restarts": restarts + 1, "steps_lost": lost + again}
            change = f"world {world} → {WORLD_SIZE} at step {step}"
            say(f"{change}, resumed from step {start}, {again} steps repeated")
        self.tries = self.tries % 10 + 1
        self.note(step)
        if self.tries == 10:  # each time the same error, and no machine that came or went
            fail(f"{self.run_dir}: 10 starts and no step beyond {self.furthest}, see their errors")

    def note(self, step):
        """Leaves where the run stands, in one write: a kill leaves the old numbers or the new."""
        if self.run_dir:
            numbers = [step, *self.elastic.values(), self.furthest, self.tries]
            os.pwrite(self.progress, "".join(f"{n:12}" for n in numbers).encode(), 0)

    def open_comet(self):
        """Starts Comet's experiment or continues it. Whatever ails Comet, training goes on."""
        online = os.environ.get("COMET_START_ONLINE", "").lower() not in ("0", "false", "no")
        self.offline = self.flags["comet_offline"] or not online
        if not self.offline and "COMET_API_KEY" not in os.environ:
            return say("Comet is off: set COMET_API_KEY, or use --comet-offline without an account")
        os.environ.setdefault("COMET_LOGGING_CONSOLE", "CRITICAL")  # errors are said below
        import comet_ml

        config = dict.fromkeys(COMET_OFF, False) | {"name": self.flags["experiment_name"]}
        config |= {"offline_directory": str(self.run_dir / "comet"), "display_summary_level": 0}
        place = {"project_name": self.flags["comet_project_name"], "experiment_key": self.comet_key}
        place |= {"workspace": self.flags["comet_workspace"], "online": not self.offline}
        try:
            config = comet_ml.ExperimentConfig(**config)
            self.comet = comet_ml.start(experiment_config=config, **place)
            self.comet.log_parameters(self.flags | self.facts)
        except Exception as error:
            say(f"Comet cannot be reached, training goes on without it: {error!r:.120}")

    def lap(self, phase):
        """Books the time since the last lap. On a GPU a lap is an event in the current stream."""
        now = torch.cuda.Event(enable_timing=True) if self.cuda else time.perf_counter()
        if self.cuda:
            now.record()
        self.laps.append((phase, now))

    def times(self):
        """Mean ms per step since the last call, as metrics. What was booked as "outside" is not."""
        if self.cuda:
            self.laps[-1][1].synchronize()
        ms = Counter()
        for (_, before), (phase, now) in zip(self.laps, self.laps[1:], strict=False):
            ms[phase] += before.elapsed_time(now) if self.cuda else 1000 * (now - before)
        ms["total"] = ms.total() - ms["outside"]
        ms["backward"] += ms["encode"] + ms["travel"]  # gradients that a hook sends within it
        steps = sum(phase == "update" for phase, _ in self.laps[1:])
        self.laps = self.laps[-1:]
        phases = ("data", "forward", "backward", "update", "total", "encode")
        return {f"time/{phase}_ms": ms[phase] / steps for phase in phases if phase in ms}

    def step(self, step, metrics):
        """To be called once per optimizer step, with metrics where there are any."""
        self.bar.update()
        if step > self.furthest:
            self.furthest, self.tries = step, 0
        self.note(step)
        if RANK > 0 or not metrics:
            return
        metrics, self.pending = {"step": step} | metrics | self.pending, {}
        self.archive_at = float("inf") if step == self.bar.total else self.archive_at
        if "loss" in metrics:
            tokens = self.flags["global_batch_size"] * self.flags["seq_length"]
            rate = 1000 * tokens / metrics["time/total_ms"]
            metrics |= {"tokens_seen": step * tokens, "tokens_per_second": rate}
            if self.facts["peak_flops"]:
                metrics["mfu"] = rate * self.facts["flops_per_token"] / self.facts["peak_flops"]
            self.bar.set_postfix_str(f"loss {metrics['loss']:.3f}")
        shown = [f"{k} {metrics[k]:{form}}" for k, form in CONSOLE.items() if k in metrics]
        say("  ".join([f"step {step:>5}/{self.bar.total}", *shown]))
        if self.run_dir:
            if shutil.disk_usage(self.run_dir).free < 2**20:
                fail(f"--save-dir {self.run_dir}: the disk is full")
            # JSON knows neither NaN nor infinity: null stands for them.
            finite = {k: v if abs(v) < float("inf") else None for k, v in metrics.items()}
            self.file.write(json.dumps(finite) + "\n")
            for name, number in metrics.items():
                self.board.add_scalar(name, number, step)
        if self.comet:
            self.comet.log_metrics(metrics, step=step)

    def saved(self, times):
        """After a checkpoint: its times join the next line. A kill empties the archive that Comet
        has open offline, so it is closed here, at most every five minutes: it takes a second."""
        self.pending |= times
        if self.comet and self.offline and time.monotonic() > self.archive_at:
            self.comet.end()
            self.open_comet()
            self.archive_at = time.monotonic() + 300

    def close(self):
        self.bar.close()
        if self.run_dir:
            self.board.close()
        if self.comet:
            self.comet.end()


def gathered(value, group=None):
    """The values of all ranks in a list, on all ranks; the first is rank 0's."""
    values = [value] * WORLD_SIZE
    if dist.is_initialized():
        dist.all_gather_object(values, value, group)
    return values


def size_and_crc(path):
    """Size in bytes and CRC-32 of a file, None if it is missing or empty."""
    if not path.is_file() or path.stat().st_size == 0:
        return None
    content = np.memmap(path, mode="r")
    return [content.size, zlib.crc32(content)]


def flush(path):
    """Returns when a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def checkpoints(run_dir):
    """Yields (folder, plain values) of complete checkpoints, newest first; no values if altered."""
    for folder in sorted(run_dir.glob("step-????????"), reverse=True):
        try:
            state = json.loads((folder / "state.json").read_text())
            intact = state.pop("crc32") == zlib.crc32(json.dumps(state).encode())
        except (OSError, ValueError, KeyError, AttributeError):
            intact = False
        yield folder, state if intact else None


def tensors_of(model, optimizer):
    """This rank's share of a checkpoint. Hyperparameters are not in it: those of the flags hold."""
    model_state, optimizer_state = dcp_state.get_state_dict(model, optimizer)
    return {"model": model_state, "moments": optimizer_state["state"]}


def save_checkpoint(run_dir, step, model, optimizer, plain, keep):
    """Saves model, optimizer and `plain`, a dict for JSON; keeps the newest `keep` checkpoints.
    Returns metrics. On a full disk the run ends in one line; earlier checkpoints stay intact."""
    return write_checkpoint(run_dir, step, tensors_of(model, optimizer), plain, keep, None)


def write_checkpoint(run_dir, step, tensors, plain, keep, group):
    """The same for a copy of `tensors_of`, with collectives of `group`, None for the default."""
    start = time.perf_counter()
    folder, temporary = run_dir / f"step-{step:08d}", run_dir / f"step-{step:08d}.tmp"
    parts = [tensors["model"], *tensors["moments"].values()]
    needed = sum(t.numel() * t.element_size() for part in parts for t in part.values())
    try:
        if min(gathered(shutil.disk_usage(run_dir).free, group)) < 1.01 * needed + 2**20:
            raise OSError(f"it takes {needed:,}")  # a full disk surfaces in DCP as a riddle
        writer = dcp.FileSystemWriter(temporary)  # it flushes
        dcp.save(tensors, storage_writer=writer, process_group=group)
        mine = [*temporary.glob(f"__{RANK}_*"), *temporary.glob(".metadata" if RANK == 0 else "-")]
        parts = gathered([(file.name, size_and_crc(file)) for file in mine], group)
        if RANK == 0:
            plain = plain | {"step": step, "files": dict(sum(parts, []))}
            plain["crc32"] = zlib.crc32(json.dumps(plain).encode())
            (temporary / "state.json").write_text(json.dumps(plain))
            flush(temporary / "state.json")
            flush(temporary)
            temporary.rename(folder)
            flush(run_dir)
            for old, _ in list(checkpoints(run_dir))[keep:]:
                shutil.rmtree(old.rename(old.with_suffix(".old")))
    except (dcp.api.CheckpointException, OSError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        free = shutil.disk_usage(run_dir).free
        fail(f"--save-dir {run_dir}: {folder.name} not saved, {free:,} bytes are free: {error}")
    ms = 1000 * (time.perf_counter() - start)
    return {"checkpoint/save_ms": ms, "checkpoint/stall_ms": ms}


def load_checkpoint(run_dir, model, optimizer):
    """Loads the newest intact checkpoint; returns its plain values, {"step": 0} if there is none.

    Rank 0 chooses. Each file is verified, by one rank, before anything is unpickled. What is
    damaged is named, renamed and passed over for the one before."""
    for leftover in run_dir.glob("step-????????.[!d]*") if RANK == 0 else []:  # .tmp, .old
        shutil.rmtree(leftover)
    with tempfile.NamedTemporaryFile(dir=run_dir) as mark:
        name = Path(gathered(mark.name)[0]).name
        if not all(gathered((run_dir / name).exists())):
            fail(f"--save-dir {run_dir}: must be one folder that all nodes share")
    for folder, state in gathered(list(checkpoints(run_dir)))[0]:
        files = sorted(state["files"].items()) if state else []
        bad = [f for f, known in files[RANK::WORLD_SIZE] if size_and_crc(folder / f) != known]
        bad = sum(gathered(bad), []) if state else ["state.json"]
        if not bad:
            break
        say(f"{folder} is damaged ({', '.join(bad)}): renamed .damaged, the one before is taken")
        if RANK == 0:
            shutil.rmtree(folder.with_suffix(".damaged"), ignore_errors=True)
            folder.rename(folder.with_suffix(".damaged"))
    else:
        return {"step": 0}
    tensors = tensors_of(model, optimizer)
    try:
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder))
    except (dcp.api.CheckpointException, RuntimeError, ValueError) as error:
        fail(f"{folder} does not fit this model: {error}")
    moments = dcp_state.get_optimizer_state_dict(model, optimizer) | {"state": tensors["moments"]}
    dcp_state.set_optimizer_state_dict(model, optimizer, moments)
    dcp_state.set_model_state_dict(model, tensors["model"])
    say(f"resumed from {folder}")
    return state


def save_final_model(run_dir, step, model, config, tokenizer):
    """Writes `run_dir`/final_model, fp32 weights and tokenizer, which `from_pretrained` opens."""
    options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dcp_state.get_model_state_dict(model, options=options)
    folder, temporary, problem = run_dir / "final_model", run_dir / "final_model.tmp", None
    try:
        if RANK == 0:
            with torch.device("meta"):
                shell = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            once = {name for name, _ in [*shell.named_parameters(), *shell.named_buffers()]}
            weights = {name: weight for name, weight in weights.items() if name in once}  # no ties
            shell.save_pretrained(temporary, state_dict=weights)
            tokenizer.save_pretrained(temporary)
            with contextlib.suppress(OSError, ValueError):  # as the pretrained model has it, if any
                generation = transformers.GenerationConfig.from_pretrained(config.name_or_path)
                generation.to_json_file(temporary / "generation_config.json")
            (temporary / f"step-{step:08d}").touch()  # tells which step's model this is
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
    except Exception as error:
        problem = f"--save-dir {run_dir}: final_model was not written: {error}"
    if problem := gathered(problem)[0]:
        fail(problem)

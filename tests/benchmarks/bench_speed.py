"""Measures speed, memory, start, checkpoints and recovery of the stages, some against peers.py."""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import nodes
import psutil
import torch
import transformers
from bench_common import (
    GPU,
    STAGE_01,
    STAGE_02,
    STAGE_03,
    STAGE_04,
    STAGE_05,
    STAGE_06,
    STAGE_07,
    STAGE_08,
    environment,
    report,
    torchrun,
    write_model,
)
from conftest import ROOT, metrics
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROUNDS = 3
THREADS = str(os.cpu_count())


def sizes(hidden, mlp, layers, **more):
    return {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers} | more


TIED = {"tie_word_embeddings": True}
LLAMA_25M = sizes(512, 1344, 8, num_attention_heads=8)
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
LLAMA_1B = sizes(2048, 8192, 16, num_attention_heads=32, num_key_value_heads=8, **TIED)
LLAMA_1B |= {"head_dim": 64, "vocab_size": 128256}
QWEN_06B = sizes(1024, 3072, 28, num_attention_heads=16, num_key_value_heads=8, **TIED)
QWEN_06B |= {"model_type": "qwen3", "head_dim": 128, "vocab_size": 151936}
# A mixture of 1.4 B parameters. Each token has 4 of the 32 experts of a block.
MIXTURE = {"model_type": "qwen3_moe", "hidden_size": 1024, "moe_intermediate_size": 768}
MIXTURE |= {"num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 16}
MIXTURE |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
MIXTURE |= {"vocab_size": 151936, "tie_word_embeddings": True}
TINY = sizes(128, 320, 3, vocab_size=1024, **TIED)
# Name: sizes, sequence length, micro-batch, global batch, steps, of which to warm up.
MODELS = {
    "tiny, 0.7 M": (TINY, 256, 4, 16, 60, 20),
    "Llama, 25 M": (LLAMA_25M, 128, 4, 16, 6, 2),
    "GPT-2, 124 M": (GPT2, 128, 2, 4, 6, 2),
}
if GPU:
    MODELS = {
        "Llama-3.2-1B, 2048 tokens": (LLAMA_1B, 2048, 4, 16, 15, 5),
        "Qwen3-0.6B, 2048 tokens": (QWEN_06B, 2048, 4, 16, 15, 5),
        "a mixture of 1.4 B, 2048 tokens": (MIXTURE, 2048, 4, 16, 15, 5),
        "GPT-2, 124 M": (GPT2, 1024, 16, 64, 30, 10),
    }


def setting(folder, name, **more):
    """A model of the table above as what peers.py takes."""
    config, seq_length, batch_size, global_batch_size, steps, warm = MODELS[name]
    config = {"max_position_embeddings": 4096} | config | more
    model = write_model(Path(folder, "model"), **config)
    how = {"model": str(model), "seq_length": seq_length, "batch_size": batch_size}
    return how | {"global_batch_size": global_batch_size, "steps": steps, "warm": warm}


def flags_of(how, name, folder):
    """The same as flags of a stage, which logs every `warm` steps."""
    flags = ["-m", how["model"], "--from-scratch", "-d", "dummy"]
    flags += ["-s", how["seq_length"], "-b", how["batch_size"]]
    flags += ["--global-batch-size", how["global_batch_size"], "--max-steps", how["steps"]]
    flags += ["--log-freq", how["warm"], "--eval-sequences", 1]
    return [*flags, "-e", name, "--save-dir", folder]


def command_of(stage, processes, flags, patch=None):
    """That of a run on this machine. Stage 01 needs no torchrun, if nothing in it is changed."""
    if stage == STAGE_01 and not patch:
        return [sys.executable, ROOT / stage / "train-llm.py", *flags]
    return torchrun(["--standalone", "--nproc-per-node", processes], stage, patch, flags)


def result_of(how, run_dir):
    """Tokens per second after the warm-up, and what a run logged."""
    lines = list(metrics(run_dir).values())
    (board,) = Path(run_dir, "tensorboard").iterdir()
    events = EventAccumulator(str(board)).Reload().Scalars("train/loss")
    logged_at = {event.step: event.wall_time for event in events}
    seconds = running_time(logged_at[how["warm"]], logged_at[how["steps"]])
    tokens = how["global_batch_size"] * how["seq_length"] * (how["steps"] - how["warm"])
    losses = {line["step"]: line["train/loss"] for line in lines}
    return {"tokens_per_second": tokens / seconds, "losses": losses} | lines[-1]


def run_stage(how, stage, processes, *more, patch=None, threads=None):
    """One run of a stage; its result. A single process has a thread for each core."""
    threads = threads or (THREADS if processes == 1 else "1")
    with tempfile.TemporaryDirectory() as folder:
        flags = [*flags_of(how, "run", folder), *more]
        call(command_of(stage, processes, flags, patch), OMP_NUM_THREADS=threads)
        return result_of(how, Path(folder, "run"))


def run_side_by_side(how):
    """Two runs of stage 01 at once, each with one thread and half of the batch: tokens/s summed."""
    half = how | {"global_batch_size": how["global_batch_size"] // 2}
    names = ("a", "b")
    with tempfile.TemporaryDirectory() as folder:
        runs = [launch(command_of(STAGE_01, 1, flags_of(half, name, folder))) for name in names]
        for run in runs:
            finish(run)
        rates = [result_of(half, Path(folder, name))["tokens_per_second"] for name in names]
    return {"tokens_per_second": sum(rates)}


def run_peer(how, name, processes=1, **more):
    """One run of peers.py; what it printed."""
    command = [sys.executable, Path(__file__).with_name("peers.py"), name, json.dumps(how | more)]
    if processes > 1 or name == "accelerated":
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
        command[1:1] = launcher
    out = call(command, OMP_NUM_THREADS=THREADS if processes == 1 else "1")
    result = json.loads([line for line in out.splitlines() if line.startswith("{")][-1])
    if "tokens" in result:
        seconds = running_time(result["begin"], result["end"])
        result["tokens_per_second"] = result["tokens"] / seconds
    return result


class Turn:
    """The processes of a contender, and when they ran."""

    def __init__(self):
        self.processes = []
        self.is_on = False
        self.slices = []  # begin and end of each time in which they were not stopped

    def switch(self, on):
        """Lets all processes go on, or stops them."""
        self.is_on = on
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                for member in [process, *process.children(recursive=True)]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        member.resume() if on else member.suspend()


own = threading.local()  # the turn of the contender that this thread runs
SLICE = 0.5  # seconds


def in_turn(contenders, rounds=ROUNDS, sliced=not GPU):
    """Runs each contender once per round, A B A B; the results of each by name.

    How fast a shared machine is changes within seconds. So with `sliced` all contenders of a round
    are started together, and each goes on for half a second in turn, while the others are
    stopped."""
    results = {name: [] for name in contenders}
    for number in range(rounds):
        if sliced:
            found = in_slices(contenders)
        else:
            found = {name: run() for name, run in contenders.items()}
        for name, result in found.items():
            results[name].append(result)
            rate = result["tokens_per_second"]
            print(f"round {number + 1}: {name}: {rate:,.0f} tokens/s", flush=True)
    return results


def in_slices(contenders):
    """One round of `in_turn`."""
    with ThreadPoolExecutor(len(contenders)) as pool:
        turns = {name: Turn() for name in contenders}

        def run(name):
            own.turn = turns[name]
            return contenders[name]()

        futures = {name: pool.submit(run, name) for name in contenders}
        while not all(future.done() for future in futures.values()):
            for name, turn in turns.items():
                if not futures[name].done():
                    begin = time.time()
                    turn.switch(on=True)
                    wait([futures[name]], SLICE)
                    turn.switch(on=False)
                    turn.slices.append((begin, time.time()))
        return {name: future.result() for name, future in futures.items()}


def running_time(begin, end):
    """Seconds between two times, without those in which the contender was stopped."""
    if not (turn := getattr(own, "turn", None)):
        return end - begin
    return sum(max(0, min(end, last) - max(begin, first)) for first, last in turn.slices)


def launch(command, **variables):
    """Starts a process of a contender, which waits for its turn."""
    environ = environment(**variables)
    pipe = subprocess.PIPE
    words = [str(word) for word in command]
    process = psutil.Popen(words, env=environ, stdout=pipe, stderr=pipe, text=True)
    if turn := getattr(own, "turn", None):
        turn.processes.append(process)
        turn.switch(turn.is_on)
    return process


def finish(process):
    """Waits for a process; what it printed."""
    out, err = process.communicate()
    if process.returncode:
        raise RuntimeError(err[-3000:])
    return out


def call(command, **variables):
    """Runs a process to its end; what it printed."""
    return finish(launch(command, **variables))


def ratios(results, name, other):
    """Median and range of tokens/s of one contender against another, round by round."""
    pairs = zip(results[name], results[other], strict=True)
    values = [x["tokens_per_second"] / y["tokens_per_second"] for x, y in pairs]
    return f"{statistics.median(values):.2f}", f"{min(values):.2f} to {max(values):.2f}"


def rate(results, name):
    return f"{statistics.median(x['tokens_per_second'] for x in results[name]):,.0f}"


def compare(results, name, other):
    """Tokens/s of two contenders, and of the first one against the other."""
    return [rate(results, name), rate(results, other), *ratios(results, name, other)]


def must_agree(stage, losses):
    """The same work: a peer's losses are those that the stage logged."""
    bound = 2e-2 if GPU else 1e-4
    for step, loss in stage["losses"].items():
        if abs(losses[step - 1] / loss - 1) > bound:
            sys.exit(f"step {step}: the peer's loss is {losses[step - 1]}, the stage's {loss}")


def single():
    """Stage 01 against the bare loop and transformers.Trainer, on one device."""
    rows = []
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            how = setting(folder, name)
            contenders = {
                "stage 01": partial(run_stage, how, STAGE_01, 1, "--no-compile"),
                "the bare loop": partial(run_peer, how, "bare"),
                "Trainer": partial(run_peer, how, "trainer"),
            }
            if name.startswith("tiny"):
                padded = partial(run_peer, how, "trainer", padded=True)
                contenders["Trainer, documents padded"] = padded
            results = in_turn(contenders)
        must_agree(results["stage 01"][0], results["the bare loop"][0]["losses"])
        for contender in contenders:
            row = [name, contender, rate(results, contender)]
            rows.append([*row, *ratios(results, "stage 01", contender)])
    head = ["model", "", "tokens/s", "stage 01 against it, median", "range"]
    report("single", head, rows)


def scaling():
    """Two processes: stages 02 and 03 against two runs of stage 01, one another, and accelerate."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = setting(folder, "Llama, 25 M") | {"steps": 3, "warm": 1}
        how = model | {"seq_length": 128, "batch_size": 4, "global_batch_size": 32}
        kept = "stage 03 --no-reshard-after-forward"
        contenders = {
            "two runs of stage 01": partial(run_side_by_side, how),
            "stage 02": partial(run_stage, how, STAGE_02, 2),
            "stage 03": partial(run_stage, how, STAGE_03, 2),
            kept: partial(run_stage, how, STAGE_03, 2, "--no-reshard-after-forward"),
            "accelerate, DDP": partial(run_peer, how, "accelerated", 2),
            "accelerate, FSDP2": partial(run_peer, how, "accelerated", 2, fsdp=True),
        }
        results = in_turn(contenders)
        for name in ("accelerate, DDP", "accelerate, FSDP2"):
            must_agree(results["stage 02"][0], results[name][0]["losses"])
        pairs = [("stage 02", "two runs of stage 01"), ("stage 02", "accelerate, DDP")]
        pairs += [("stage 03", "stage 02"), (kept, "stage 02"), ("stage 03", "accelerate, FSDP2")]
        for name, other in pairs:
            rows.append(["4 of 512 tokens", name, other, *compare(results, name, other)])
        whole = model | {"seq_length": 256, "batch_size": 8, "global_batch_size": 16}
        contenders = {
            "stage 02": partial(run_stage, whole, STAGE_02, 2),
            "stage 03": partial(run_stage, whole, STAGE_03, 2),
        }
        results = in_turn(contenders)
        pair = ("stage 03", "stage 02")
        rows.append(["1 of 2048 tokens", *pair, *compare(results, *pair)])
    head = ["micro-batches of a step, on each process", "", "against", "tokens/s"]
    head += ["tokens/s of the other", "ratio, median of 3", "range"]
    report("scaling", head, [row for row in rows if row[1] == "stage 02"])
    report("scaling-fsdp", head, [row for row in rows if row[1] != "stage 02"])


def streaming():
    """Two processes: stage 06, which tokenizes during the steps, against stage 05, which has done
    so before the first one. The documents of 06 are the paragraphs of the default data, in as many
    files as there are streams, or in one, of which each stream reads all. 05 has the same text."""
    rows = []
    paragraphs = [part for text in topics.values() for part in text.split("\n\n")]
    lines = [json.dumps({"text": text}) + "\n" for text in paragraphs]
    settings = [("tiny, 0.7 M", 16), ("tiny, 0.7 M", 1), ("Llama, 25 M", 16)]
    for name, num_files in settings if not GPU else [(name, 16) for name in MODELS]:
        with tempfile.TemporaryDirectory() as folder:
            how = setting(folder, name) if GPU else setting(folder, name, vocab_size=1024)
            how["steps"] *= 2
            text, files = Path(folder, "data.txt"), Path(folder, "data")
            text.write_text("\n\n".join(paragraphs * 8))
            files.mkdir()
            for i in range(num_files):
                Path(files, f"{i:02}.jsonl").write_text("".join(lines[i::num_files] * 8))
            contenders = {
                "stage 06": partial(run_stage, how, STAGE_06, 2, "-d", files),
                "stage 05": partial(run_stage, how, STAGE_05, 2, "-d", text),
            }
            results = in_turn(contenders, 5, sliced=False)  # it reads times of the log, too
            row = [name, num_files, *compare(results, "stage 06", "stage 05")]
            for stage in contenders:
                data_ms = statistics.median(x["time/data_ms"] for x in results[stage])
                row.append(f"{data_ms:.1f}")
            rows.append(row)
    head = ["model", "files", "stage 06, tokens/s", "stage 05, tokens/s"]
    head += ["06 / 05, median of 5", "range", "data in a step of 06, ms", "of 05, ms"]
    report("streaming-cuda" if GPU else "streaming", head, rows)


# Memory that is freed goes back to the system at once. Otherwise it would seem to be in use.
TRIM = {"MALLOC_MMAP_THRESHOLD_": "131072"}


def memory():
    """Stages 02 and 03, one micro-batch on each rank: the state of a rank (parameters, gradients,
    Adam's moments), and the most memory that the process takes in a step."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        how = setting(folder, "Llama, 25 M") | {"batch_size": 2, "steps": 3, "warm": 1}
        for processes in (1, 2, 4):
            how["global_batch_size"] = 2 * processes
            states, peaks = [], []
            for stage in (STAGE_02, STAGE_03):
                lines, _ = run_and_count(how, stage, "peaks", processes=processes, **TRIM)
                states.append(state_of(lines))
                peaks.append(f"{1000 * lines[-1]['memory/peak_gb']:,.0f}")
            rows.append([processes, *states, *peaks])
    head = ["processes W", "state of a rank, stage 02, MB", "stage 03, MB"]
    head += ["peak of the process, stage 02, MB", "stage 03, MB"]
    report("memory", head, rows)


MICRO_BATCHES = (1, 2, 4)
ACCUMULATING = {
    "stage 02": (STAGE_02, ()),
    "stage 03": (STAGE_03, ()),
    "stage 03 --no-reshard-after-forward": (STAGE_03, ("--no-reshard-after-forward",)),
}


def accumulation():
    """What more micro-batches of the same size cost: memory, bytes on the network, speed."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        how = setting(folder, "Llama, 25 M") | {"batch_size": 2, "warm": 1}
        for name, (stage, more) in ACCUMULATING.items():
            for micro_batches in MICRO_BATCHES:
                how["global_batch_size"] = 4 * micro_batches
                short, lines, megabytes = sent_in_a_step(how, stage, *more, patch="peaks", **TRIM)
                row = [name, micro_batches, state_of(lines)]
                row += [f"{1000 * short[2]['memory/peak_gb']:,.0f}", f"{megabytes:.1f}"]
                rows.append([*row, speed_of(how, lines)])
                print(rows[-1], flush=True)
    head = ["25.3 M parameters, 2 ranks", "micro-batches per step", "state of a rank, MB"]
    head += ["peak of the process, MB", "sent by a rank per step, MB", "tokens/s"]
    report("accumulation", head, rows)


def run_and_count(how, stage, patch, *more, processes=2, **variables):
    """Processes in a network namespace of their own: the log, and bytes that a rank sent."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["--master-addr", "127.0.0.1", "--nproc-per-node", processes]
        command = torchrun(launcher, stage, patch, [*flags_of(how, "run", folder), *more])
        inside = 'ip link set lo up; "$@"; code=$?; grep lo: /proc/net/dev; exit $code'
        command = ["unshare", "-rn", "bash", "-c", inside, "bash", *command]
        out = call(command, GLOO_SOCKET_IFNAME="lo", **variables)
        received = int(out.split("lo:")[-1].split()[0])
        return list(metrics(Path(folder, "run")).values()), received / processes


def sent_in_a_step(how, stage, *more, processes=2, patch=None, **variables):
    """The logs of 3 steps and of 7, and the MB that a rank sends in a step: what 7 steps send more
    is for 4 steps. Only the shorter run, for the memory, has the patch and the variables."""
    short = how | {"steps": 3}
    short, sent_by_3 = run_and_count(short, stage, patch, *more, processes=processes, **variables)
    lines, sent_by_7 = run_and_count(how | {"steps": 7}, stage, None, *more, processes=processes)
    return short, lines, (sent_by_7 - sent_by_3) / 4e6


def state_of(lines):
    """Of a rank, in MB."""
    return f"{1000 * lines[-1]['memory/state_gb']:.1f}"


def speed_of(how, lines):
    """Tokens per second, the median of all steps but the first two."""
    ms = statistics.median(line["time/total_ms"] for line in lines[2:])
    return f"{1000 * how['global_batch_size'] * how['seq_length'] / ms:,.0f}"


def split_by(stage, flag, settings):
    """A stage on 4 processes, split by each number in `settings`, with the same tokens in a step.
    Yields the number, the log, and the MB that a rank sends in a step."""
    first = None
    for number, how in settings.items():
        _, lines, megabytes = sent_in_a_step(how, stage, flag, number, processes=4)
        losses = {line["step"]: line["train/loss"] for line in lines}
        first = first or losses
        must_agree({"losses": first}, list(losses.values()))
        yield number, lines, megabytes


def tensor():
    """Stage 07 on 4 processes, split in three ways.

    A tensor group of n ranks takes a micro-batch n times as large as one rank alone, so that each
    way has one micro-batch in a step."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        how = setting(folder, "Llama, 25 M") | {"global_batch_size": 8, "warm": 1}
        config = transformers.AutoConfig.from_pretrained(how["model"])
        settings = {size: how | {"batch_size": 2 * size} for size in (1, 2, 4)}
        for size, lines, megabytes in split_by(STAGE_07, "--tensor-size", settings):
            row = [f"{4 // size}, {size}", speed_of(how, lines), state_of(lines)]
            counts = [megabytes, *sent_by_tensor(config, size, settings[size])]
            rows.append(row + [f"{count:.1f}" for count in counts])
            print(rows[-1], flush=True)
    head = ["(shard, tensor), 25.3 M parameters", "tokens/s", "state of a rank, MB"]
    head += ["sent by a rank per step, MB", "by the formulas: FSDP, MB", "tensor parallelism, MB"]
    report("tensor", head, rows)


def pipeline():
    """Stage 08 on 4 processes: one pipeline stage, two and four."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        how = setting(folder, "Llama, 25 M")
        how |= {"global_batch_size": 16, "batch_size": 2, "warm": 1}
        config = transformers.AutoConfig.from_pretrained(how["model"])
        settings = dict.fromkeys((1, 2, 4), how)
        for num_stages, lines, megabytes in split_by(STAGE_08, "--stages", settings):
            counts = [megabytes, *sent_by_pipeline(config, num_stages, how)]
            row = [f"{num_stages}, {4 // num_stages}", state_of(lines)]
            rows.append(row + [f"{count:.1f}" for count in counts])
            print(rows[-1], flush=True)
    head = ["(pipeline stage, shard), 25.3 M parameters", "state of the largest rank, MB"]
    head += ["sent by a rank per step, MB", "by the formulas: FSDP, MB"]
    head.append("between pipeline stages, MB")
    report("pipeline", head, rows)


def sent_by_fsdp(config):
    """MB that a rank of many sends in a micro-batch, fp32, if FSDP alone divides the model.

    All-gathers, of blocks in the forward and in the backward pass, and a reduce-scatter. What is
    outside of the blocks stays gathered from forward to backward. Gloo carries a reduce-scatter out
    as an all-reduce, which sends twice as much."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    in_blocks = sum(p.numel() for p in model.model.layers.parameters())
    outside = model.num_parameters() - in_blocks
    return 4 / 1e6 * ((2 + 2) * in_blocks + (1 + 2) * outside)


def sent_by_tensor(config, tensor_size, how):
    """MB that one of 4 ranks sends in a step of one micro-batch, fp32: by FSDP, by the layers."""
    groups = 4 // tensor_size
    by_fsdp = (groups - 1) / groups * sent_by_fsdp(config) / tensor_size
    tokens = how["batch_size"] * how["seq_length"]
    hidden, layers = config.hidden_size, config.num_hidden_layers
    all_gathers = (4 * layers + 2) * tokens * hidden
    reduce_scatters = 2 * all_gathers
    all_reduces = 2 * (3 * tokens + (2 * layers + 1) * hidden)  # of the loss, of norms
    share = (tensor_size - 1) / tensor_size
    return by_fsdp, 4 / 1e6 * share * (all_gathers + reduce_scatters + all_reduces)


def sent_by_pipeline(config, num_stages, how):
    """MB that one of 4 ranks sends in a step on average, fp32: by FSDP, to other stages."""
    pipelines = 4 // num_stages
    micro_batches = how["global_batch_size"] // pipelines // how["batch_size"]
    shares = (pipelines - 1) / pipelines / num_stages
    by_fsdp = shares * micro_batches * sent_by_fsdp(config)
    tokens = how["batch_size"] * how["seq_length"]
    boundaries = (num_stages - 1) / num_stages
    return by_fsdp, 4 / 1e6 * 2 * boundaries * micro_batches * tokens * config.hidden_size


def pipeline_speed():
    """Stage 08 in two pipeline stages, of four equal blocks each, against stage 01 on one core."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        how = setting(folder, "Llama, 25 M") | {"seq_length": 128, "batch_size": 4, "warm": 1}
        for micro_batches in (2, 8):
            how |= {"global_batch_size": 4 * micro_batches, "steps": 3}
            contenders = {
                "stage 01": partial(run_stage, how, STAGE_01, 1, "--no-compile", threads="1"),
                "stage 08": partial(run_stage, how, STAGE_08, 2, "--stages", 2),
            }
            results = in_turn(contenders)
            row = [micro_batches, f"{2 * micro_batches / (micro_batches + 1):.2f}"]
            rows.append(row + compare(results, "stage 08", "stage 01"))
    head = ["micro-batches of 512 tokens", "2 M / (M + 1)", "two pipeline stages, tokens/s"]
    head += ["stage 01 on one core, tokens/s", "ratio, median of 3", "range"]
    report("pipeline-speed", head, rows)


def memory_of_process(name):
    """What Linux counts for this process under a name, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) * 1024


def peaks(module, _):
    """Makes the peak that is logged that of the time since the last line, not since the start."""
    memory_gb = module.memory_gb

    def since_the_last_call(model, optimizer, device):
        memory = memory_gb(model, optimizer, device)
        memory["memory/peak_gb"] = memory_of_process("VmHWM") / 1e9
        Path("/proc/self/clear_refs").write_text("5")
        return memory

    module.memory_gb = since_the_last_call


def checkpoint():
    """Stage 04 saves in the loop, stage 05 beside it: what the loop waits for in each."""
    rows, stalls = [], []
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder, "model"), **sizes(512, 2048, 16))
        for stage in (STAGE_04, STAGE_05):
            flags = ["-m", model, "--from-scratch", "-d", "dummy", "-s", 64, "-b", 2]
            flags += ["--global-batch-size", 4, "--eval-sequences", 4, "--max-steps", 40]
            flags += ["--ckpt-freq", 8, "--log-freq", 1, "-e", stage, "--save-dir", folder]
            flags += ["--compression", "none", "--shard-size", 1]
            out = call(command_of(stage, 1 if GPU else 2, flags, "stalls"))
            line = [x for x in out.splitlines() if x.startswith("stalls ")][0]
            stalls.append(statistics.median(map(float, line.split()[1:])))
            lines = metrics(Path(folder, stage)).values()
            row = [stage, f"{next(iter(lines))['memory/state_gb']:.2f}", f"{stalls[-1]:,.0f}"]
            # The steps beside which files are written, and the others.
            near = [x["time/total_ms"] for x in lines if x["step"] > 8 and x["step"] % 8 in (1, 2)]
            far = [x["time/total_ms"] for x in lines if x["step"] > 8 and x["step"] % 8 in (6, 7)]
            row += [f"{statistics.median(part):,.0f}" for part in (near, far)]
            rows.append([*row, f"{stalls[-1] / stalls[0]:.2f}"])
    head = ["stage", "state of a rank, GB", "the loop waits, ms"]
    head += ["each of the two steps after it, ms", "other steps, ms", "wait against stage 04"]
    report("checkpoint-cuda" if GPU else "checkpoint", head, rows)


def stalls(module, _):
    """Prints for how long each save stops the loop, in ms: the time outside of the eighth step, the
    sixteenth and so on. The last save is not counted."""
    outside, previous = [], [0.0]  # the first is what came before the first step
    lap, close = module.RunLog.lap, module.RunLog.close

    def timed_lap(log, phase):
        lap(log, phase)
        now = time.perf_counter()
        if phase == "outside":
            outside.append(1000 * (now - previous[0]))
        previous[0] = now

    def close_and_print(log):
        close(log)
        if module.dist.get_rank() == 0:
            print("stalls", *outside[8:40:8], flush=True)

    module.RunLog.lap, module.RunLog.close = timed_lap, close_and_print


def recovery():
    """From a kill to the first new step of stage 05, in its parts."""
    os.environ["COURSE_HF_HOME"] = tempfile.mkdtemp()
    cases = {
        "a process of one machine": (1, "1"),
        "one of two nodes, LAST_CALL=30, the default": (2, "30"),
    }
    rows = []
    for name, (count, last_call) in cases.items():
        tries = [recover(count, last_call) for _ in range(3)]
        parts = [statistics.median(part) for part in zip(*tries, strict=True)]
        rows.append([name, *(f"{max(part, 0.0):.1f}" for part in parts)])
        rows[-1][-2] = f"{parts[-2]:.0f}"
        print(rows[-1], flush=True)
    head = ["killed, by SIGKILL", "detection, s", "rendezvous, s", "start, s", "load, s"]
    report("recovery", [*head, "replay, s", "steps repeated", "in all, s"], rows)


def recover(count, last_call):
    """Kills one worker, or of two nodes the second: the seconds of each part."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        variables = {"NNODES": "1" if count == 1 else "1:2", "LAST_CALL": last_call}
        processes = 2 if count == 1 else 1
        start = stack.enter_context(nodes.job(folder, processes, **variables))
        flags = ["-e", "a", "--save-dir", folder, "--shard-size", 1, "--log-freq", 1]
        flags += ["--ckpt-freq", 20, "--max-steps", 100000, "-s", 64, "--global-batch-size", 8]
        started = [start(f"node-{i}", *flags) for i in range(count)]
        # The checkpoint of step 20 is on disk, and some steps are made after it.
        nodes.wait_until(lambda: nodes.last_step(folder / "a") > 30, "30 steps", started)
        workers = {worker.pid for node in started for worker in node.workers()}
        killed = time.time()
        if count == 1:
            os.kill(min(started[0].workers(), key=lambda w: w.pid).pid, signal.SIGKILL)
        else:
            started[1].kill()
        furthest, seen, agent = nodes.last_step(folder / "a"), {}, started[0]
        while "new" not in seen:
            said = agent.said()
            behind = said.split("failed (exitcode")[-1]
            fresh = [w for w in agent.workers() if w.pid not in workers]
            is_new = "loaded" in seen and nodes.last_step(folder / "a") > furthest
            marks = {
                "noticed": "failed (exitcode" in said or "Closing process" in said,
                "built": fresh and " parameters, " in behind,
                "loaded": fresh and "resumed from /" in behind,
                "new": fresh and is_new,
            }
            for mark, is_there in marks.items():
                if is_there:
                    seen.setdefault(mark, time.time())
            if fresh:
                with contextlib.suppress(psutil.Error):
                    seen.setdefault("born", fresh[0].create_time())
            time.sleep(0.02)
        [line] = [x for x in behind.splitlines() if "steps are repeated" in x]
        repeated = int(line.split(", ")[-1].split()[0])
        marks = [killed, *(seen[x] for x in ("noticed", "born", "built", "loaded", "new"))]
        parts = [later - earlier for earlier, later in zip(marks, marks[1:], strict=False)]
        return [*parts, repeated, seen["new"] - killed]


PATCHES = {"peaks": peaks, "stalls": stalls}

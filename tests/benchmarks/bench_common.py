"""What the measurements share: models, processes, two nodes on one machine, tables."""

import contextlib
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from conftest import ROOT, metrics, save_tokenizer

MEASURED = Path(os.environ.get("MEASURED", ROOT / "outputs" / "measured"))
STAGE_01, STAGE_02, STAGE_03 = "01-single-gpu", "02-ddp", "03-fsdp"
STAGE_04, STAGE_05, STAGE_06 = "04-compression", "05-multinode", "06-streaming"
STAGE_07 = "07-tensor-parallel"
STAGE_08 = "08-pipeline-parallel"
STAGE_09 = "09-context-parallel"
STAGE_10 = "10-expert-parallel"
GPU = torch.cuda.is_available()


def machine():
    """What a timing depends on: device, cores, versions."""
    device = torch.cuda.get_device_name() if GPU else platform.machine()
    with contextlib.suppress(OSError):
        names = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x]
        device = device if GPU else names[0].split(":")[1].strip()
    return f"{device}, {os.cpu_count()} cores, PyTorch {torch.__version__}"


def write_model(folder, **sizes):
    """A config, a Llama's unless `sizes` name another, and the tokenizer of tiny.

    By default its vocabulary is for `-d dummy`. The tokens of texts are those of tiny, 1024."""
    config = {"model_type": "llama", "vocab_size": 384, "max_position_embeddings": 256}
    config |= {"bos_token_id": 0, "eos_token_id": 0, "num_attention_heads": 4} | sizes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(folder)
    return folder


def torchrun(how, stage, patch, flags):
    """The command that runs a stage, or with a `patch` the stage with a function changed."""
    command = [sys.executable, "-m", "torch.distributed.run", *how]
    script = [ROOT / stage / "train-llm.py"]
    if patch:
        script = [Path(__file__).with_name("benchmark.py"), "worker", stage, patch]
    return [str(word) for word in [*command, *script, *flags]]


def environment(**more):
    """One thread a process, no network, and no cache that a run before has filled."""
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | more


def report(name, head, rows):
    """Prints a table and writes it to `name`.md, below the command and the machine."""
    text = table(head, rows)
    command = shlex.join(["python", "tests/benchmarks/benchmark.py", *sys.argv[1:]])
    print(f"{text}{machine()}\n", flush=True)
    (MEASURED / f"{name}.md").write_text(f"`{command}`, {machine()}\n\n{text}")


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


# Two nodes on one machine: network namespaces, joined by a pair of virtual interfaces.


@contextlib.contextmanager
def two_nodes(mbit=None):
    """Yields the names of two namespaces. With `mbit` each sends at most so many Mbit/s."""
    names = [f"course-{os.getpid()}-{i}" for i in (0, 1)]
    ip = partial(subprocess.run, check=True)
    try:
        for name in names:
            ip(["ip", "netns", "add", name])
        pair = ["ip", "link", "add", "wire", "netns", names[0], "type", "veth"]
        ip([*pair, "peer", "name", "wire", "netns", names[1]])
        for i, name in enumerate(names):
            ip(["ip", "-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "wire"])
            ip(["ip", "-n", name, "link", "set", "wire", "up"])
            ip(["ip", "-n", name, "link", "set", "lo", "up"])
            if mbit:
                burst = max(65536, mbit * 1_000_000 // 8 // 200)
                limit = ["rate", f"{mbit}mbit", "burst", str(burst), "latency", "200ms"]
                tc = ["tc", "qdisc", "add", "dev", "wire", "root", "tbf", *limit]
                ip(["ip", "netns", "exec", name, *tc])
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


def counted(name):
    """What a node's interface sent so far, in bytes: payload, without headers.

    Ethernet 14, IP 20, TCP with timestamps 32. A packet of many segments counts as one here."""
    command = ["ip", "netns", "exec", name, "cat"]
    command += [f"/sys/class/net/wire/statistics/tx_{what}" for what in ("bytes", "packets")]
    total, packets = map(int, subprocess.run(command, capture_output=True).stdout.split())
    return total - 66 * packets


def run_on(names, stage, patch, flags):
    """Runs a stage with a process on each node; its metrics, and payload that each node sent."""
    with tempfile.TemporaryDirectory() as folder:
        before = [counted(name) for name in names]
        processes = []
        for i, name in enumerate(names):
            how = ["--nnodes", 2, "--node-rank", i, "--nproc-per-node", 1]
            how += ["--master-addr", "10.77.0.1", "--master-port", 29500]
            named = ["-e", "run", "--save-dir", folder]
            command = torchrun(how, stage, patch, [*flags, *named])
            processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", name, *command],
                    env=environment(GLOO_SOCKET_IFNAME="wire"),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        for process in processes:
            errors = process.communicate(timeout=1800)[1]
            if process.returncode:
                raise RuntimeError(f"{stage} {patch} {flags}: {errors[-3000:]}")
        sent = [counted(name) - count for name, count in zip(names, before, strict=True)]
        return list(metrics(Path(folder, "run")).values()), sent

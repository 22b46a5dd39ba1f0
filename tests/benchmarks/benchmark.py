"""Measures what the README and the chapters quote. Each command prints a table and writes it, and
the same as JSON with the machine, to outputs/measured. Timings are ratios within one command on one
machine, contenders in turn.

    python tests/benchmarks/benchmark.py COMMAND

    single      rung 01 against a bare loop and transformers.Trainer
    scaling     rungs 02 and 03 against two of rung 01, and accelerate
    world       rungs 02 and 03 with one process, against rung 01
    memory      state of a rank in rungs 02 and 03
    start       start to first step, against imports and loading
    timers      what timers and log cost of a step
    checkpoint  what a checkpoint costs the loop, beside it and in it
    recovery    from a kill to the first new step
    levers      what was tried to make a rung faster or smaller
    wire        bytes on a network interface against those that a run logs
    link        time of a step on links of 50, 200 and 1000 Mbit/s
    encode      speed of encoding and decoding against that of a copy
    scale       memory, traffic and time of large models, on paper
    picture     losses, speed, memory and bytes of all rungs side by side
    all         all of the above, two hours
    loss        final loss of each way to compress gradients, two hours
    profile 03-fsdp  a torch.profiler trace of a rung, to outputs/

`pip install -e '.[test,bench]'` brings the peers. `wire`, `link` and `picture` need Linux, root,
and `ip` and `tc` (Debian: iproute2).
"""

import sys
import time
from pathlib import Path

# When this is started as a script: where conftest.py is, and what is in tests/support.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "support"))

import bench_compression
import bench_paper
import bench_picture
import bench_speed
import torch.distributed as dist
from bench_common import MEASURED
from conftest import ROOT, load

PATCHES = bench_compression.PATCHES | bench_speed.PATCHES


def worker(rung, patches, flags):
    """One process of a rung with functions changed, as `name=value,name=value` says."""
    module = load(rung)
    for patch in patches.split(","):
        name, _, value = patch.partition("=")
        PATCHES[name](module, value)
    sys.argv = [str(ROOT / rung / "train-llm.py"), *flags]
    module.main(*module.parse_args())
    if rung == "01-single-gpu":
        return
    module.gc.collect()
    dist.barrier()
    time.sleep(0.2)
    dist.destroy_process_group()


def everything():
    for name, command in COMMANDS.items():
        if name not in ("all", "loss", "tabulate", "profile"):
            print(f"## {name}", flush=True)
            command()


COMMANDS = {"single": bench_speed.single, "scaling": bench_speed.scaling}
COMMANDS |= {"world": bench_speed.world_of_one, "memory": bench_speed.memory}
COMMANDS |= {"start": bench_speed.start, "timers": bench_speed.timers}
COMMANDS |= {"checkpoint": bench_speed.checkpoint, "recovery": bench_speed.recovery}
COMMANDS |= {"levers": bench_speed.levers, "wire": bench_compression.wire}
COMMANDS |= {"link": bench_compression.link, "encode": bench_compression.encode}
COMMANDS |= {"scale": bench_paper.on_paper, "picture": bench_picture.picture}
COMMANDS |= {"loss": bench_compression.loss, "tabulate": bench_compression.tabulate}
COMMANDS |= {"profile": bench_speed.profile, "all": everything}

if __name__ == "__main__":
    name, *rest = sys.argv[1:] or [""]
    if name == "worker":
        worker(rest[0], rest[1], rest[2:])
    elif name in COMMANDS and len(rest) == (name == "profile"):
        MEASURED.mkdir(exist_ok=True)
        COMMANDS[name](*rest)
    else:
        sys.exit(f"{__doc__}\nOne of: {', '.join(COMMANDS)}")

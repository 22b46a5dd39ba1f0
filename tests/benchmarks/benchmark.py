"""Measures what the README and the chapters quote. Each command prints a table and writes it to
outputs/measured (to another folder, if MEASURED names one). Timings are ratios within one command
on one machine, contenders in turn.

    python tests/benchmarks/benchmark.py COMMAND

    single      stage 01 against a bare loop and transformers.Trainer
    scaling     stages 02 and 03 against two of stage 01, and accelerate
    memory      state of a rank in stages 02 and 03
    accumulation  memory, traffic and speed with 1, 2 and 4 micro-batches in a step
    checkpoint  what a checkpoint costs the loop, beside it and in it
    recovery    from a kill to the first new step
    streaming   stage 06 against stage 05
    tensor      stage 07 with one to four ranks in a tensor group
    pipeline    stage 08 with one, two and four pipeline stages
    pipeline-speed  stage 08 with two pipeline stages against stage 01
    wire        bytes on a network interface against those that a run logs
    encode      speed of encoding and decoding against that of a copy
    link        time of a step on links of 50, 200 and 1000 Mbit/s
    scale       which stages fit in the memory of some GPUs, by plan.py
    all         all of the above, two hours
    loss        final loss of each way to compress gradients, about an hour
    gpu         speed, MFU and memory on one GPU (gpu.sh)
    gpu-peers   stage 01 against a bare loop and Trainer on one GPU (gpu.sh)
    gpu-2       on all GPUs, two at least (gpu-2.sh)

`pip install -e '.[test,bench]'` brings the peers. `wire` and `link` need Linux, root, and `ip` and
`tc` (Debian: iproute2); `memory`, `accumulation`, `tensor` and `pipeline` Linux, `ip` and
`unshare`.
"""

import sys
from pathlib import Path

# When this is started as a script: where conftest.py is, what is in tests/support, and plan.py.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(3, str(Path(__file__).resolve().parents[2]))

import bench_compression
import bench_gpu
import bench_paper
import bench_speed
from bench_common import MEASURED, STAGE_01
from conftest import ROOT, load

PATCHES = bench_compression.PATCHES | bench_gpu.PATCHES | bench_speed.PATCHES


def worker(stage, patch, flags):
    """One process of a stage with functions changed, as `name` or `name=value,name` says."""
    module = load(stage)
    for change in patch.split(","):
        name, _, value = change.partition("=")
        PATCHES[name](module, value)
    sys.argv = [str(ROOT / stage / "train-llm.py"), *flags]
    module.main(module.parse_args())
    if stage != STAGE_01:
        module.dist.barrier()
        module.time.sleep(0.2)
        module.dist.destroy_process_group()


def everything():
    for name, command in COMMANDS.items():
        if name not in ("all", "loss") and not name.startswith("gpu"):
            print(f"## {name}", flush=True)
            sys.argv[1] = name
            command()


COMMANDS = {
    "single": bench_speed.single,
    "scaling": bench_speed.scaling,
    "memory": bench_speed.memory,
    "accumulation": bench_speed.accumulation,
    "checkpoint": bench_speed.checkpoint,
    "recovery": bench_speed.recovery,
    "streaming": bench_speed.streaming,
    "tensor": bench_speed.tensor,
    "pipeline": bench_speed.pipeline,
    "pipeline-speed": bench_speed.pipeline_speed,
    "wire": bench_compression.wire,
    "encode": bench_compression.encode,
    "link": bench_compression.link,
    "scale": bench_paper.on_paper,
    "all": everything,
    "loss": bench_compression.loss,
    "gpu": bench_gpu.gpu,
    "gpu-peers": bench_gpu.peers,
    "gpu-2": bench_gpu.all_gpus,
}

if __name__ == "__main__":
    name, *rest = sys.argv[1:] or [""]
    if name == "worker":
        worker(rest[0], rest[1], rest[2:])
    elif name in COMMANDS and not rest:
        MEASURED.mkdir(exist_ok=True)
        COMMANDS[name]()
    else:
        sys.exit(f"{__doc__}\nOne of: {', '.join(COMMANDS)}")

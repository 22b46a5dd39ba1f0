"""Measures what the README and the chapters quote. Each command prints a table and writes it, and
the same as JSON with the machine, to outputs/measured (to another folder, if MEASURED names one).
Timings are ratios within one command on one machine, contenders in turn.

    python tests/benchmarks/benchmark.py COMMAND

    single      stage 01 against a bare loop and transformers.Trainer
    scaling     stages 02 and 03 against two of stage 01, and accelerate
    streaming   stage 06 against stage 05
    world       stages 02 and 03 with one process, against stage 01
    memory      state of a rank in stages 02 and 03
    accumulation  memory, traffic and speed with 1, 2 and 4 micro-batches in a step
    replica-memory  memory of accumulated gradients in stage 04
    tensor      stage 07 with one to four ranks in a tensor group
    tensor-memory  peak memory of a step of stage 07
    pipeline    stage 08 with one, two and four pipeline stages
    pipeline-bubble  how long the pipeline stages of stage 08 are idle
    pipeline-memory  what a pipeline stage of stage 08 keeps for the backward pass
    pipeline-timeline  a picture of a step of stage 08
    timeline    a torch.profiler trace of a step of stages 01, 02 and 03, and pictures of it
    draw-timeline  the pictures of what `timeline` has measured
    loading     memory and time to load and to export a pretrained model of 1 GB
    start       start to first step, against imports and loading
    timers      what timers and log cost of a step
    checkpoint  what a checkpoint costs the loop, beside it and in it
    recovery    from a kill to the first new step
    levers      what was tried to make a stage faster or smaller
    wire        bytes on a network interface against those that a run logs
    link        time of a step on links of 50, 200 and 1000 Mbit/s
    encode      speed of encoding and decoding against that of a copy
    scale       memory, traffic and time of large models, on paper
    picture     losses, speed, memory and bytes of stages 01 to 05 side by side
    all         all of the above, two hours
    loss        final loss of each way to compress gradients, two hours
    tabulate    the tables and the plot of what `loss` has measured so far
    profile 03-fsdp  a torch.profiler trace of a stage, to outputs/

`pip install -e '.[test,bench]'` brings the peers. `wire`, `link`, `picture` and `timeline` need
Linux, root, and `ip` and `tc` (Debian: iproute2), `accumulation`, `replica-memory`, `tensor`,
`tensor-memory` and `pipeline` Linux and `ip`.
"""

import sys
from pathlib import Path

# When this is started as a script: where conftest.py is, and what is in tests/support.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "support"))

import bench_compression
import bench_paper
import bench_picture
import bench_pipeline
import bench_speed
import bench_timeline
from bench_common import MEASURED, STAGE_01
from conftest import ROOT, load

PATCHES = bench_compression.PATCHES | bench_speed.PATCHES | bench_pipeline.PATCHES
PATCHES |= bench_timeline.PATCHES


def worker(stage, patches, flags):
    """One process of a stage with functions changed, as `name=value,name=value` says."""
    module = load(stage)
    for patch in patches.split(","):
        name, _, value = patch.partition("=")
        PATCHES[name](module, value)
    sys.argv = [str(ROOT / stage / "train-llm.py"), *flags]
    module.main(module.parse_args())
    if stage != STAGE_01:
        module.dist.barrier()
        module.time.sleep(0.2)
        module.dist.destroy_process_group()


def everything():
    apart = ("all", "loss", "tabulate", "draw-timeline", *ARGUMENTS)
    for name, command in COMMANDS.items():
        if name not in apart:
            print(f"## {name}", flush=True)
            command()


COMMANDS = {
    "single": bench_speed.single,
    "scaling": bench_speed.scaling,
    "streaming": bench_speed.streaming,
    "world": bench_speed.world_of_one,
    "memory": bench_speed.memory,
    "accumulation": bench_speed.accumulation,
    "replica-memory": bench_speed.replica_memory,
    "tensor": bench_speed.tensor,
    "tensor-memory": bench_speed.tensor_memory,
    "pipeline": bench_pipeline.pipeline,
    "pipeline-bubble": bench_pipeline.pipeline_bubble,
    "pipeline-memory": bench_pipeline.pipeline_memory,
    "pipeline-timeline": bench_pipeline.pipeline_timeline,
    "timeline": bench_timeline.timeline,
    "draw-timeline": bench_timeline.draw_timeline,
    "loading": bench_speed.loading,
    "start": bench_speed.start,
    "timers": bench_speed.timers,
    "checkpoint": bench_speed.checkpoint,
    "recovery": bench_speed.recovery,
    "checking": bench_speed.checking,
    "levers": bench_speed.levers,
    "wire": bench_compression.wire,
    "link": bench_compression.link,
    "encode": bench_compression.encode,
    "scale": bench_paper.on_paper,
    "picture": bench_picture.picture,
    "loss": bench_compression.loss,
    "tabulate": bench_compression.tabulate,
    "profile": bench_speed.profile,
    "all": everything,
}
# How many words follow these commands. The others stand alone.
ARGUMENTS = {"profile": 1}

if __name__ == "__main__":
    name, *rest = sys.argv[1:] or [""]
    if name == "worker":
        worker(rest[0], rest[1], rest[2:])
    elif name in COMMANDS and len(rest) == ARGUMENTS.get(name, 0):
        MEASURED.mkdir(exist_ok=True)
        COMMANDS[name](*rest)
    else:
        sys.exit(f"{__doc__}\nOne of: {', '.join(COMMANDS)}")

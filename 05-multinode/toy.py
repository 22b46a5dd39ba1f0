"""One of two ranks gets SIGTERM. Both save after the same step, end, and are started again."""

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
life = 1 + int(os.environ["TORCHELASTIC_RESTART_COUNT"])
agent = os.getppid()  # torchrun, which is the same process in both lives
checkpoint = Path(tempfile.gettempdir(), f"toy-{agent}.pt")
stop_signals, own_signals, all_signals, weights = [], [], [], []

signal.signal(signal.SIGTERM, lambda number, frame: stop_signals.append(number))
state = {"step": 0, "weight": torch.tensor(0.0), "momentum": torch.tensor(0.0)}
if checkpoint.exists():
    state = torch.load(checkpoint)
first = state["step"] + 1

for step in range(first, 7):
    own_signals.append(len(stop_signals))
    count = torch.tensor(len(stop_signals))
    dist.all_reduce(count)
    all_signals.append(count.item())
    if (life, rank, step) == (1, 0, 2):
        os.kill(os.getpid(), signal.SIGTERM)  # to itself, and after its contribution

    targets = torch.tensor([2.0, 6.0])[rank::world_size]  # a share of the global batch
    gradient = (state["weight"] - targets).sum() / 2
    dist.all_reduce(gradient)
    state["momentum"] = state["momentum"] / 2 + gradient
    state["weight"] = state["weight"] - state["momentum"] / 2
    state["step"] = step
    weights.append(state["weight"].item())

    if count > 0:
        if rank == 0:
            torch.save(state, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").rename(checkpoint)
        break

steps = f"life {life}, rank {rank}, steps {first} to {step}"
signals = f"own signals {own_signals}, all signals {all_signals}"
print(f"{steps}: {signals}, weights {weights}", flush=True)

dist.barrier()
time.sleep(0.2)  # so that threads of Gloo end before the process does
dist.destroy_process_group()
if count > 0:
    sys.exit(1)  # torchrun starts both again
checkpoint.unlink(missing_ok=True)

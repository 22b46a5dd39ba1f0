"""A training loop that survives SIGKILL. In step 5 of its first life it kills itself."""

import os
import signal
import tempfile
from pathlib import Path

import torch

life = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
agent = os.getppid()  # torchrun, which is the same process in both lives
checkpoint = Path(tempfile.gettempdir(), f"toy-{agent}.pt")

state = {"step": 0, "weight": torch.zeros(1), "momentum": torch.zeros(1)}
if checkpoint.exists():
    state = torch.load(checkpoint)
print(f"life {life} begins after step {state['step']}", flush=True)

for step in range(state["step"] + 1, 9):
    target = (4.0, 2.0)[step % 2]  # the step alone decides what it trains on
    error = state["weight"] - target
    state["momentum"] = 0.9 * state["momentum"] + 2 * error
    state["weight"] = state["weight"] - 0.1 * state["momentum"]
    state["step"] = step
    print(f"life {life}, step {step}: loss {error.item() ** 2:.4f}", flush=True)
    if step % 3 == 0:
        torch.save(state, checkpoint.with_suffix(".tmp"))
        checkpoint.with_suffix(".tmp").replace(checkpoint)  # all of the new file, or the old one
    if life == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
checkpoint.unlink()

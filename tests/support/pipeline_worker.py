"""One rank of stage 08 that writes when it computes, or what it keeps, to a file of its own.

python pipeline_worker.py virtual|kept FOLDER FLAGS...    started as a rank, see conftest.fork
"""

import contextlib
import json
import os
import sys
import weakref
from pathlib import Path

import torch
from conftest import load
from torch.distributed.tensor import DTensor

STAGE = "08-pipeline-parallel"
# How long a forward pass of a pipeline stage takes, and a backward pass, which is twice the work.
FORWARD, BACKWARD = 1, 2


def write(folder, values):
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(values))


def wrap_forward(module, after, around=contextlib.nullcontext):
    """Has each forward pass in training run inside `around(model)`, and then call `after`."""
    keep_stage = module.keep_stage

    def wrapped(model, blocks, stage):
        kept, forward = keep_stage(model, blocks, stage), model.forward

        def watched_forward(**inputs):
            if not torch.is_grad_enabled():
                return forward(**inputs)
            with around(model):
                outputs = forward(**inputs)
            after(outputs.logits)
            return outputs

        model.forward = watched_forward
        return kept

    module.keep_stage = wrapped


def wrap_lap(module, act):
    """Has each lap of the log call `act(phase)`."""
    lap = module.RunLog.lap

    def wrapped(log, phase):
        lap(log, phase)
        act(phase)

    module.RunLog.lap = wrapped


def kept(module, folder):
    """Writes the bytes of the activations that are kept after the first forward pass of a step,
    and at the most."""
    saved, counts = [], []

    def around(model):
        def pack(tensor):
            # Also weights are saved for the backward pass. They are no activations.
            weights = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
            of_weights = {weight.untyped_storage().data_ptr() for weight in weights}
            if tensor.untyped_storage().data_ptr() not in of_weights:
                saved.append(weakref.ref(tensor))
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def count(outputs):
        storages = {}
        for reference in saved:
            tensor = reference()
            if tensor is not None:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        counts.append(sum(storages.values()))

    def note(phase):
        if phase == "data":
            counts.clear()
        if phase == "update":
            write(folder, [counts[0], max(counts)])

    wrap_forward(module, count, around)
    wrap_lap(module, note)


def virtual(module, folder):
    """Writes when the last pass of each step ends, and the time of all passes, by a virtual clock.

    A pass advances the clock of its pipeline stage. When two stages exchange tensors, both clocks
    become the later of the two: neither can go on before the other is there. So the result does not
    depend on the machine."""
    clock, busy, end, steps = [0], [0], [0], []
    exchange = module.PipelineStage.exchange

    def advance(units):
        clock[0] += units
        busy[0] += units
        end[0] = clock[0]

    def exchange_clocks(stage, other, sent, received):
        exchange(stage, other, sent, received)
        if torch.is_grad_enabled() and (sent is not None or received is not None):
            other_clock = torch.tensor([0])
            exchange(stage, other, torch.tensor(clock), other_clock)
            clock[0] = max(clock[0], other_clock.item())

    def after(outputs):
        advance(FORWARD)
        outputs.register_hook(lambda _: advance(BACKWARD))

    def note(phase):
        if phase == "data":
            clock[0] = busy[0] = 0
        if phase == "update":
            steps.append([end[0], busy[0]])
            write(folder, steps)

    module.PipelineStage.exchange = exchange_clocks
    wrap_forward(module, after)
    wrap_lap(module, note)


if __name__ == "__main__":
    stage = load(STAGE)
    {"kept": kept, "virtual": virtual}[sys.argv[1]](stage, sys.argv[2])
    del sys.argv[1:3]
    stage.main(stage.parse_args())

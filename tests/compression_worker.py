"""One rank of a group that averages gradients with rung 04's hook; test_compression.py starts it.

Rank 0 prints a JSON list: for each case what all ranks got out of it."""

import json
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import load

LENGTHS = (1, 5, 255, 257, 2048, 10_007)
MODES = [("none", "fp32", 1.0), ("bf16", "fp32", 1.0), ("int8", "fp32", 1.0)]
MODES += [("int4", "fp32", 1.0), ("dct", "fp32", 1.0), ("dct", "int4", 1.0)]
MODES += [("dct", wire, 0.5) for wire in ("fp32", "bf16", "int8", "int4")]
MODES += [("topk", "fp32", 0.5), ("topk", "int8", 0.5), ("topk", "int8", 0.01)]


def gathered(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def result(average, gradient, mode, wire, keep, leader):
    """Averages a copy of `gradient`; the facts, the same on all ranks."""
    mean, laps, traffic = gradient.clone(), [], Counter()
    average(mean, dist.group.WORLD, mode, wire, 256, keep, leader, laps.append, traffic)
    exact = torch.stack(gathered(gradient)).double().mean(0)
    bits = gathered(mean.view(torch.int32).tolist())
    error = (mean - exact).norm() / exact.norm().clamp(min=1e-30)
    facts = {"mode": mode, "wire": wire, "keep": keep, "n": len(gradient), "leader": leader}
    facts["leads"] = None
    if (mode, wire, keep) == ("topk", "fp32", 0.5) and gradient.count_nonzero() == len(gradient):
        rows = F.pad(gathered(gradient)[leader], (0, -len(gradient) % 256)).view(-1, 256)
        larger = torch.zeros_like(rows).scatter_(1, rows.abs().topk(128).indices, 1)
        facts["leads"] = torch.equal(mean != 0, larger.flatten()[: len(mean)] != 0)
    facts |= {"identical": all(other == bits[0] for other in bits), "error": error.item()}
    facts |= {"finite": mean.isfinite().all().item(), "zero": not mean.any().item()}
    return facts | {"laps": laps, "sent": traffic["sent"], "dense": traffic["dense"]}


def main():
    module = load("04-compression")
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    rank, world = dist.get_rank(), dist.get_world_size()
    results = []
    for mode, wire, keep in MODES:
        for leader, n in enumerate(LENGTHS):
            gradient = torch.randn(n, generator=torch.Generator().manual_seed(10 * n + rank))
            how = (mode, wire, keep, leader % world)
            results.append({"input": "random"} | result(module.average, gradient, *how))
        results.append({"input": "zero"} | result(module.average, torch.zeros(999), *how))
        for name, value in (("nan", torch.nan), ("inf", torch.inf)):
            # On a rank that does not lead, so that the leader cannot know of it.
            gradient = torch.randn(999, generator=torch.Generator().manual_seed(rank))
            if rank == 1:
                gradient[700] = value
            how = (mode, wire, keep, 0)
            results.append({"input": name} | result(module.average, gradient, *how))
    if rank == 0:
        print("RESULTS" + json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

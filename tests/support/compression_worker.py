"""One rank of a group that averages gradients with stage 04's hook; test_compression.py starts it.

Rank 0 prints a JSON list: for each case what all ranks got out of it."""

import json
from datetime import timedelta

import torch
import torch.distributed as dist
from conftest import load

MODES = ("none", "dct", "int8")
LENGTHS = (1, 5, 255, 257, 2048, 10_007)


def gathered(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def result(stage, mode, micro_batches):
    """Averages the sum of the gradients of some micro-batches; the facts, the same on all ranks."""
    average = stage.ReplicaAverage(dist.group.WORLD, mode, torch.device("cpu"))
    total = torch.stack(micro_batches).sum(0)
    for i, gradient in enumerate(micro_batches):
        mean = gradient.clone()
        average.is_last = i == len(micro_batches) - 1
        average("a module", mean)
    exact = torch.stack(gathered(total)).double().mean(0)
    bits = gathered(mean.view(torch.int32).tolist())
    return {
        "mode": mode,
        "n": len(mean),
        "identical": all(other == bits[0] for other in bits),
        "error": ((mean - exact).norm() / exact.norm().clamp(min=1e-30)).item(),
        "finite": mean.isfinite().all().item(),
        "zero": not mean.any().item(),
        "sent": sum(average.bytes_sent.values()),
    }


def main():
    stage = load("04-compression")
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    rank = dist.get_rank()
    results = []
    for mode in MODES:
        for n in LENGTHS:
            draw = torch.Generator().manual_seed(10 * n + rank)
            gradients = [torch.randn(n, generator=draw) for _ in range(3)]
            results.append({"input": "random"} | result(stage, mode, gradients))
        results.append({"input": "zero"} | result(stage, mode, [torch.zeros(999)]))
        for name, value in (("nan", torch.nan), ("inf", torch.inf)):
            gradient = torch.randn(999, generator=torch.Generator().manual_seed(rank))
            if rank == 1:
                gradient[700] = value
            results.append({"input": name} | result(stage, mode, [gradient]))
    if rank == 0:
        print("RESULTS" + json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

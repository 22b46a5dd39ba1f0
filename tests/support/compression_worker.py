"""One rank of a group that averages gradients with stage 04's hook; test_compression.py starts it.

Rank 0 prints a JSON list: for each case what all ranks got out of it."""

import json
from datetime import timedelta

import torch
import torch.distributed as dist
from conftest import load

LENGTHS = (1, 5, 255, 257, 2048, 10_007)
MODES = [("none", "fp32", 1.0), ("bf16", "fp32", 1.0), ("int8", "fp32", 1.0)]
MODES += [("int4", "fp32", 1.0), ("dct", "fp32", 1.0), ("dct", "int4", 1.0)]
MODES += [("dct", wire, 0.5) for wire in ("fp32", "bf16", "int8", "int4")]
MODES += [("randk", "fp32", 1.0), ("randk", "fp32", 0.5), ("randk", "int4", 0.5)]
MODES += [("randk", "int8", 0.01)]


def gathered(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def result(module, gradient, mode, wire, keep):
    """Averages a copy of `gradient`; the facts, the same on all ranks."""
    mean, laps = gradient.clone(), []
    settings = (mode, keep, 256, wire, False, False, laps.append)
    compressor = module.GradientCompressor(dist.group.WORLD, *settings)
    compressor.start_step(len(gradient), torch.device("cpu"))
    compressor("a module", mean)
    exact = torch.stack(gathered(gradient)).double().mean(0)
    bits = gathered(mean.view(torch.int32).tolist())
    error = (mean - exact).norm() / exact.norm().clamp(min=1e-30)
    facts = {"mode": mode, "wire": wire, "keep": keep, "n": len(gradient), "exact": None}
    if (mode, wire, keep) == ("randk", "fp32", 0.5):
        chunks, where = torch.arange(len(gradient)) // 256, torch.arange(len(gradient)) % 256
        travels = torch.isin((where - (chunks * 2654435761 >> 16)) % 256, compressor.indices)
        facts["exact"] = torch.allclose(mean, torch.where(travels, exact, 0).float(), atol=1e-6)
    facts |= {"identical": all(other == bits[0] for other in bits), "error": error.item()}
    facts |= {"finite": mean.isfinite().all().item(), "zero": not mean.any().item()}
    facts |= {"sent": compressor.bytes_sent, "dense": compressor.bytes_uncompressed}
    return facts | {"laps": laps}


def main():
    module = load("04-compression")
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    rank = dist.get_rank()
    results = []
    for mode, wire, keep in MODES:
        how = (mode, wire, keep)
        for n in LENGTHS:
            gradient = torch.randn(n, generator=torch.Generator().manual_seed(10 * n + rank))
            results.append({"input": "random"} | result(module, gradient, *how))
        results.append({"input": "zero"} | result(module, torch.zeros(999), *how))
        for name, value in (("nan", torch.nan), ("inf", torch.inf)):
            gradient = torch.randn(999, generator=torch.Generator().manual_seed(rank))
            if rank == 1:
                gradient[700] = value
            results.append({"input": name} | result(module, gradient, *how))
    if rank == 0:
        print("RESULTS" + json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""The changes that a benchmark makes to stage 04."""

import bench_compression
import pytest
import torch
import torch.distributed as dist
from conftest import load

pytestmark = pytest.mark.law6


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_silent_sends_nothing(one_process):
    """What a run sends besides gradients is that of a run whose gradients stay as they are."""
    module = load("04-compression")
    average = module.ReplicaAverage(dist.group.WORLD, "int8", torch.device("cpu"))
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    given = gradient.clone()
    average("a module", given)
    assert not torch.equal(given, gradient)  # rounded

    bench_compression.silent(module, "")
    average = module.ReplicaAverage(dist.group.WORLD, "int8", torch.device("cpu"))
    given = gradient.clone()
    average("a module", given)
    assert torch.equal(given, gradient)
    assert not average.bytes_sent

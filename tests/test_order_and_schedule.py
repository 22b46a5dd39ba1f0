"""Who reads which sample, and the learning rate, for any number of processes."""

import math

import datasets
import numpy
import pytest
import torch
import transformers
from conftest import load, script
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.law1


@pytest.fixture(scope="module")
def stages():
    return {stage: load(stage) for stage in ("01-single-gpu", "02-ddp")}


CPU = torch.device("cpu")
LENGTH = 5
ROWS = numpy.arange(200)[:, None] * LENGTH + numpy.arange(LENGTH)
DATA = datasets.Dataset.from_dict({"input_ids": ROWS.tolist()}).with_format("torch")


class Ranks:
    """Stands for torch.distributed in `make_micro_batches`, which asks it for two numbers."""

    def __init__(self, rank, world_size):
        self.get_rank = lambda group: rank
        self.get_world_size = lambda group: world_size


def read(module, indices, batch_size, rank, world_size, monkeypatch):
    monkeypatch.setattr(module, "dist", Ranks(rank, world_size), raising=False)
    group = () if world_size is None else (None,)
    return module.make_micro_batches(DATA, indices, batch_size, CPU, *group)


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(1, 40),
    batch_size=st.integers(1, 12),
    world_size=st.integers(1, 9),
    seed=st.integers(0, 100),
)
def test_ranks_share_a_global_batch(stages, count, batch_size, world_size, seed):
    """Each sequence is read with its targets by one rank, as often as stage 01 reads it; all ranks
    run as many micro-batches, no larger than asked for; the targets add up."""
    indices = numpy.random.default_rng(seed).permutation(len(DATA))[:count]
    with pytest.MonkeyPatch.context() as monkeypatch:
        alone, targets_alone = read(
            stages["01-single-gpu"], indices, batch_size, 0, None, monkeypatch
        )
        shares = [
            read(stages["02-ddp"], indices, batch_size, rank, world_size, monkeypatch)
            for rank in range(world_size)
        ]
    assert len({len(micro_batches) for micro_batches, _ in shares}) == 1
    assert len(shares[0][0]) == math.ceil(math.ceil(count / world_size) / batch_size)
    seen = []
    for micro_batches, _ in shares:
        for input_ids, targets in micro_batches:
            assert len(input_ids) <= batch_size
            real = (targets != -100).any(dim=1)
            seen += (input_ids[real][:, 0] // LENGTH).tolist()
            assert torch.equal(targets[real][:, :-1], input_ids[real][:, 1:])
            assert (targets[:, -1] == -100).all()
    assert sorted(seen) == sorted(indices.tolist())
    assert sum(targets for _, targets in shares) == targets_alone == count * (LENGTH - 1)
    assert sum(len(input_ids) for input_ids, _ in alone) == count


@pytest.mark.parametrize("world_size", [None, 1, 3])
def test_an_evaluation_loads_one_micro_batch_at_a_time(stages, world_size, monkeypatch):
    """And each sequence once, whatever the number of ranks."""
    module = stages["02-ddp" if world_size else "01-single-gpu"]
    loaded, seen = [], []
    load_all = module.make_micro_batches

    def make_micro_batches(*args):
        micro_batches, count = load_all(*args)
        loaded.append(len(micro_batches))
        return micro_batches, count

    def loss_fn(input_ids, targets):
        real = (targets != -100).any(dim=1)
        seen.extend((input_ids[real][:, 0] // LENGTH).tolist())
        return torch.ones(())

    monkeypatch.setattr(module, "make_micro_batches", make_micro_batches)
    for rank in range(world_size or 1):
        ranks = Ranks(rank, world_size)
        ranks.all_reduce = lambda tensor, group: None
        monkeypatch.setattr(module, "dist", ranks, raising=False)
        more = [None] if world_size else []
        module.evaluate(lambda input_ids: input_ids, DATA, 7, CPU, loss_fn, *more)
    assert set(loaded) == {1}
    assert sorted(seen) == list(range(len(DATA)))


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "cosine_with_restarts"])
@pytest.mark.parametrize("warmup", [0, 5])
def test_the_learning_rate_is_a_function_of_the_step(stages, name, warmup):
    """That of transformers, with a warm-up from step 0 and an end after the last step, so that the
    first step and the last one move the weights, too."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    of_transformers = "constant_with_warmup" if name == "constant" else name
    schedule = transformers.get_scheduler(of_transformers, optimizer, warmup + 1, 41)
    cycles = 1
    if name == "cosine_with_restarts":
        name, cycles = "cosine", 3
        schedule.lr_lambdas[0].keywords["num_cycles"] = 3
    lr_factor = stages["01-single-gpu"].lr_factor
    factors = [lr_factor(step, name, cycles, warmup, 40) for step in range(1, 41)]
    assert factors == pytest.approx([schedule.lr_lambdas[0](step) for step in range(1, 41)])
    assert factors[warmup] == 1
    assert all(factor > 0 for factor in factors)


def test_each_epoch_has_an_order_of_its_own_and_keeps_it():
    """The order is drawn from (seed, epoch): no permutation is replayed after a resume."""
    order = {
        (seed, epoch): numpy.random.default_rng((seed, epoch)).permutation(50).tolist()
        for seed in range(3)
        for epoch in range(3)
    }
    assert len({tuple(o) for o in order.values()}) == 9
    assert all(sorted(o) == list(range(50)) for o in order.values())
    line = "order = np.random.default_rng((args.seed, epoch)).permutation(len(train_data))"
    assert line in script("01-single-gpu").read_text()

"""FSDP by hand: a layer with a weight of four numbers, in two processes that store two each."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()


def gather(shard):
    parts = [torch.empty_like(shard) for _ in range(world_size)]
    dist.all_gather(parts, shard)
    return torch.cat(parts)


shard = torch.tensor([1.0, 2.0, 3.0, 4.0]).chunk(world_size)[rank].clone()  # all that is stored
x = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0]])[rank]  # this rank's micro-batch
target = torch.tensor([1.0, 5.0])[rank]
print(f"rank {rank}: shard {shard.tolist()}")

weight = gather(shard)  # all-gather before the forward pass
error = weight @ x - target  # the loss is error ** 2 / 2
del weight  # reshard

weight = gather(shard)  # all-gather before the backward pass
grad_x = error * weight  # for the layer below, if there were one
grad = error * x  # of the whole weight, from this rank's micro-batch
del weight  # reshard
print(f"rank {rank}: gradient {grad.tolist()}")

grad_shard = torch.empty_like(shard)
dist.reduce_scatter(grad_shard, list(grad.chunk(world_size)))  # the sum over all ranks, its part
grad_shard /= world_size  # the mean
print(f"rank {rank}: part of the mean {grad_shard.tolist()}")

shard -= 0.1 * grad_shard  # the optimizer step, without communication
print(f"rank {rank}: new shard {[round(value, 4) for value in shard.tolist()]}")

dist.barrier()
time.sleep(0.2)  # so that threads of Gloo end before the process does
dist.destroy_process_group()

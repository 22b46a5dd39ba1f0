"""Two processes add up four numbers, and then compute one gradient together."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()

numbers = torch.tensor([1.0, 2.0, 3.0, 4.0]) * 10**rank
print(f"rank {rank} has {numbers.tolist()}")
dist.all_reduce(numbers)
print(f"rank {rank} has the sums {numbers.tolist()}")

x = torch.tensor([[1.0], [2.0], [3.0], [4.0]])[rank::world_size]  # this rank's samples
y = torch.tensor([[0.0], [1.0], [1.0], [1.0]])[rank::world_size]
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.constant_(model.weight, 1 + rank)  # each rank has a different weight ...
model = DistributedDataParallel(model)  # ... and now all have that of rank 0
loss = ((model(x) - y) ** 2).sum()
(loss * world_size / 4).backward()  # 4 samples on all ranks together
weight = model.module.weight
print(f"rank {rank}: weight {weight.item()}, loss {loss.item()}, gradient {weight.grad.item()}")

dist.barrier()
time.sleep(0.2)  # so that threads of Gloo end before the process does
dist.destroy_process_group()

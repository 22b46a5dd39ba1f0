"""An MLP of 16 weights, split over two processes: by hand, and by parallelize_module."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
x = torch.tensor([[1.0, 2.0], [3.0, -1.0]])  # two tokens with two features each
A = torch.tensor([[1.0, 0.0, -1.0, 2.0], [1.0, 1.0, 1.0, -2.0]])
B = torch.tensor([[1.0, 1.0], [0.0, 1.0], [2.0, 1.0], [1.0, -2.0]])
if rank == 0:
    print(f"not split: output {((x @ A).relu() @ B).tolist()}")

own_x = x.chunk(world_size, dim=0)[rank]  # one token
own_A = A.chunk(world_size, dim=1)[rank]  # two columns
own_B = B.chunk(world_size, dim=0)[rank]  # two rows
tokens = [torch.empty_like(own_x) for _ in range(world_size)]
dist.all_gather(tokens, own_x)
features = (torch.cat(tokens) @ own_A).relu()  # of all tokens
partial_sum = features @ own_B
own_y = torch.empty_like(own_x)
dist.reduce_scatter(own_y, list(partial_sum.chunk(world_size)))
print(f"rank {rank}: features {features.tolist()}, partial sum {partial_sum.tolist()}")
print(f"rank {rank}: output {own_y.tolist()}")

mlp = nn.Sequential(nn.Linear(2, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False))
mlp.load_state_dict({"0.weight": A.T, "2.weight": B.T})  # Linear stores (outputs, inputs)
columns = ColwiseParallel(input_layouts=Shard(0))  # the input is split by tokens: gather it
rows = RowwiseParallel(output_layouts=Shard(0))  # split the output by tokens: reduce-scatter
parallelize_module(mlp, init_device_mesh("cpu", (world_size,)), {"0": columns, "2": rows})
own_x.requires_grad_()
own_y = mlp(own_x)
own_y.sum().backward()
print(f"rank {rank}: output of the module {own_y.tolist()}, gradient {own_x.grad.tolist()}")
print(f"rank {rank}: weights {mlp[0].weight.placements}, {mlp[2].weight.placements}")

dist.barrier()
time.sleep(0.2)  # so that threads of Gloo end before the process does
dist.destroy_process_group()

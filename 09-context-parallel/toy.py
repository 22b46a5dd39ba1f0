"""Causal attention of 8 tokens: on one process, and on two, each of which has 4 of the tokens."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
weights = torch.tensor([1.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 32.0])
query = torch.ones(8, 1)
key = weights.log()[:, None]  # softmax turns a key into its share of the weights
value = torch.tensor([[4.0], [8.0], [2.0], [6.0], [3.0], [10.0], [2.0], [9.0]])


def attention(query, key, value):
    """The last query sees all keys, the one before it all but one, and so on."""
    mask = torch.ones(len(query), len(key)).tril(len(key) - len(query))
    scores = (query @ key.T).masked_fill(mask == 0, -torch.inf)
    return scores.softmax(1) @ value


def plain(tensor):
    """Numbers to print: the same on every machine."""
    return tensor.flatten().round(decimals=2).tolist()


def gather(own):
    """All rows in their order, on both ranks. Rank 0 has the chunks 0 and 3, rank 1 has 1 and 2."""
    first, second = torch.empty_like(own), torch.empty_like(own)
    dist.all_gather([first, second], own)
    return torch.cat((first[:2], second, first[2:]))


if rank == 0:
    print(f"not split: output {plain(attention(query, key, value))}")

chunks = torch.arange(8).chunk(4)
own_chunks = chunks[rank], chunks[3 - rank]
own = torch.cat(own_chunks)
print(f"rank {rank}: tokens {own.tolist()}, which make {sum(own + 1)} pairs")
# Only values have gradients here. Those of keys would be added up in the same way.
keys, values = gather(key[own]), gather(value[own]).requires_grad_()
outputs = []
for chunk in own_chunks:
    end = chunk[-1] + 1
    outputs.append(attention(query[chunk], keys[:end], values[:end]))
output = torch.cat(outputs).flatten()
print(f"rank {rank}: output {plain(output)}")

# A loss that makes the gradients whole numbers: a token's output times the weights that it sees.
loss = (output * weights.cumsum(0)[own]).sum()
loss.backward()
partial = values.grad.flatten()
print(f"rank {rank}: gradients of the values, from its outputs {plain(partial)}")
parts = [torch.cat((partial[:2], partial[6:])), partial[2:6]]  # for rank 0, for rank 1
own_gradient = torch.empty(4)
dist.reduce_scatter(own_gradient, parts)
print(f"rank {rank}: gradients of its values, from all outputs {plain(own_gradient)}")

dist.barrier()
time.sleep(0.2)  # so that threads of Gloo end before the process does
dist.destroy_process_group()

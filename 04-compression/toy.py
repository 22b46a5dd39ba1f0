"""Two replicas average their gradients: by half of a DCT, and in int8. A chunk has two values."""

import time

import torch
import torch.distributed as dist

GRADIENTS = [[1.27, 0.40, -0.254, 0.10], [0.635, -0.20, 0.508, 0.10]]  # of rank 0, of rank 1
# Two values have two frequencies. This is the cosine of the lower one, (0.707, 0.707).
BASIS = torch.tensor([[0.5, 0.5]]).sqrt()


def to_int8(chunks):
    scales = chunks.abs().amax(dim=1, keepdim=True) / 127
    return (chunks / scales).round().to(torch.int8), scales


def plain(tensor):
    return [round(value, 4) for value in tensor.flatten().tolist()]


dist.init_process_group("gloo")
rank = dist.get_rank()
gradient = torch.tensor(GRADIENTS[rank])
chunks = gradient.view(-1, 2)
exact = gradient.clone()
dist.all_reduce(exact)
lines = [f"gradient {plain(gradient)}, exact mean {plain(exact / 2)}"]

spectrum = chunks @ BASIS.T
dist.all_reduce(spectrum)
lines += [f"mean by dct {plain(spectrum / 2 @ BASIS)}"]

integers, scales = to_int8(chunks)
lines += [f"integers {plain(integers)}, scales {plain(scales)}"]
sums = integers.clone()
dist.all_reduce(sums)
lines += [f"their sum {plain(sums)}"]

parts, part_scales = torch.empty_like(integers), torch.empty_like(scales)
dist.all_to_all_single(parts, integers)
dist.all_to_all_single(part_scales, scales)
lines += [f"receives {plain(parts)}, scales {plain(part_scales)}"]
mean, mean_scales = to_int8((parts * part_scales).view(2, -1, 2).mean(0))
lines += [f"mean in int8 {plain(mean)}, scale {plain(mean_scales)}"]
dist.all_gather(list(integers.split(1)), mean)
dist.all_gather(list(scales.split(1)), mean_scales)
lines += [f"mean by int8 {plain(integers * scales)}"]

for number in range(2):  # rank 0 prints first
    if number == rank:
        print("".join(f"rank {rank}: {line}\n" for line in lines), end="", flush=True)
    dist.barrier()
time.sleep(0.2)  # so that threads of Gloo end before the process does
dist.destroy_process_group()

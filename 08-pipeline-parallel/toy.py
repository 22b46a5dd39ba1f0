"""A pipeline by hand: y = w1 w0 x, one weight in each of two processes, four micro-batches."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
stage, last = dist.get_rank(), dist.get_world_size() - 1
xs, targets = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([5.0, 11.0, 20.0, 23.0])
weights = torch.arange(2.0, last + 3.0, requires_grad=True)  # the whole model: 2 and 3
weight = weights[stage].detach().clone().requires_grad_()  # what this pipeline stage has of it

num_ahead = last - stage
in_flight, sends, order = [], [], []
for i in range(len(xs) + num_ahead):
    if i < len(xs):  # the forward pass of micro-batch i
        inputs = xs[i].clone()
        if stage > 0:
            dist.recv(inputs, src=stage - 1)
            inputs.requires_grad_()
        outputs = weight * inputs
        order.append(f"F{i} {outputs:.0f}")
        if stage < last:
            sends.append(dist.isend(outputs.detach(), dst=stage + 1))
        else:
            outputs = (outputs - targets[i]) ** 2 / 2  # the loss
        in_flight.append((inputs, outputs))

    if i >= num_ahead:  # the backward pass of micro-batch i - num_ahead
        inputs, outputs = in_flight.pop(0)
        gradient = torch.ones(())
        if stage < last:
            dist.recv(gradient, src=stage + 1)
        outputs.backward(gradient)
        order.append(f"B{i - num_ahead} {gradient:.0f}")
        if stage > 0:
            sends.append(dist.isend(inputs.grad, dst=stage - 1))

for send in sends:
    send.wait()
((weights.prod() * xs - targets) ** 2 / 2).sum().backward()  # the same in one process
print("   ".join([f"stage {stage}:", *order]))  # in one piece: two processes print here
print(f"stage {stage}: gradient {weight.grad}, in one process {weights.grad[stage]}")

dist.barrier()
time.sleep(0.2)  # a process may abort if it exits while threads of Gloo are still busy
dist.destroy_process_group()

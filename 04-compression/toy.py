"""Round eight gradient values to int8 and int4, and average those of two replicas."""

import torch


def encode(values, largest):
    scale = values.abs().max() / largest
    return (values / scale).round().to(torch.int8), scale


def decode(integers, scale):
    return integers * scale


def show(name, numbers, form="z8.3f"):
    print(f"{name:8}", *(f"{number:{form}}" for number in numbers.tolist()))


gradient = torch.tensor([0.400, -1.270, 0.036, 0.002, -0.250, 0.618, -0.009, 0.004])
show("gradient", gradient)
for largest in (127, 7):
    integers, scale = encode(gradient, largest)
    print(f"\nlargest integer {largest}, scale {scale:.4f}")
    show("integers", integers, "8d")
    show("decoded", decode(integers, scale))
    show("error", decode(integers, scale) - gradient)

other = torch.tensor([-0.800, -2.540, 0.280, 0.066, 0.500, -1.240, 0.021, 0.000])
ours, theirs = encode(gradient, 127), encode(other, 127)
print("\ntwo replicas")
show("sum", ours[0] + theirs[0], "8d")  # wrong: their scales differ, and int8 ends at 127
show("mean", (decode(*ours) + decode(*theirs)) / 2)
show("exact", (gradient + other) / 2)

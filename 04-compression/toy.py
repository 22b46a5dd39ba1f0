"""Compress a chunk of a gradient, by half of a DCT and by int8; average two replicas."""

import torch


def half_of_spectrum(chunk):
    """Describes a chunk by cosines, drops the upper half of their frequencies, and decodes."""
    n = torch.arange(len(chunk))
    basis = (2 / len(chunk)) ** 0.5 * torch.cos(torch.pi / len(chunk) * (n + 0.5) * n[:, None])
    basis[0] /= 2**0.5
    basis = basis[: len(chunk) // 2]
    return basis.T @ (basis @ chunk)


def to_int8(chunk):
    scale = chunk.abs().max() / 127
    return (chunk / scale).round().to(torch.int8), scale


def show(name, numbers, form="z7.3f"):
    print(f"{name:8}", *(f"{number:{form}}" for number in numbers.tolist()))


gradient = torch.tensor([0.400, -1.270, 0.036, 0.002, -0.250, 0.618, -0.009, 0.004])
show("gradient", gradient)
integers, scale = to_int8(gradient)
for mode, decoded in {"dct": half_of_spectrum(gradient), "int8": integers * scale}.items():
    show(mode, decoded)
    print(f"error {(decoded - gradient).norm() / gradient.norm():.3f}\n")

other = torch.tensor([-0.800, -2.540, 0.280, 0.066, 0.500, -1.240, 0.021, 0.000])
(ours, our_scale), (theirs, their_scale) = to_int8(gradient), to_int8(other)
print(f"two replicas, scales {our_scale:.3f} and {their_scale:.3f}")
show("ours", ours, "7d")
show("theirs", theirs, "7d")
show("sum", ours + theirs, "7d")  # wrong: their scales differ, and int8 ends at 127
show("mean", (ours * our_scale + theirs * their_scale) / 2)
show("exact", (gradient + other) / 2)

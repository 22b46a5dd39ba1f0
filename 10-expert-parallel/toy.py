"""Four experts on two processes: 8 tokens travel to the experts that they chose, and back."""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
tokens = torch.arange(1.0, 9.0).chunk(2)[rank]  # rank 0 has 1 to 4, rank 1 has 5 to 8
choices = torch.tensor([[0, 1], [0, 2], [1, 0], [0, 3], [1, 2], [0, 1], [3, 0], [1, 0]])
choices = choices.chunk(2)[rank]  # the indices of the two experts of each token
num_choices, num_own = 2, 2  # the experts of a token, and those of a rank
weights = torch.full((4, 2), 0.5)
# An expert multiplies by its factor. Rank 0 has the experts 0 and 1, rank 1 has 2 and 3.
factors = torch.tensor([2.0, 20.0, 200.0, 2000.0]).chunk(2)[rank].requires_grad_()


def all_to_all(rows, num_sent, num_received):
    """Sends the first num_sent[0] rows to rank 0, the others to rank 1."""
    received = torch.empty(sum(num_received), dtype=rows.dtype)
    dist.all_to_all_single(received, rows, num_received, num_sent)
    return received


# A row for each pair of a token and one of its experts, sorted by expert.
order = choices.flatten().argsort(stable=True)
rows = tokens[order // num_choices]
experts = choices.flatten()[order]
print(f"rank {rank}: rows {rows.int().tolist()} for experts {experts.tolist()}")

# Counts: how many rows go to each rank, and how many come from it.
sent = (experts // num_own).bincount(minlength=2)
received = torch.empty_like(sent)
dist.all_to_all_single(received, sent)
num_sent, num_received = sent.tolist(), received.tolist()

# Dispatch. The script counts the rows of each expert, so it need not send `experts`.
arrived = all_to_all(rows, num_sent, num_received)
numbers = all_to_all(experts, num_sent, num_received) - num_own * rank
from_0, from_1 = num_received
print(f"rank {rank}: gets {arrived.int().tolist()}, {from_0} from rank 0, {from_1} from rank 1")

# Compute, and combine: rows[order.argsort()] are in the order of `choices` again.
results = factors[numbers] * arrived
returned = all_to_all(results.detach(), num_received, num_sent)[order.argsort()]
outputs = (returned.view(4, 2) * weights).sum(dim=1)
print(f"rank {rank}: outputs {outputs.tolist()}")

# Backward, for a loss that is the sum of all outputs. The gradient of a result is its routing
# weight. It travels as the row did.
gradients = all_to_all(weights.flatten()[order], num_sent, num_received)
results.backward(gradients)
print(f"rank {rank}: gradients of its experts {factors.grad.tolist()}")

dist.barrier()
time.sleep(0.2)  # so that threads of Gloo end before the process does
dist.destroy_process_group()

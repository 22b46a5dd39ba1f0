"""The shortest training loop for a language model. A text that comes with Python is the data."""

from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

SEQ_LENGTH = 64
BATCH_SIZE = 32
STEPS = 40

# Data: each byte of the text is a token. A row is a sequence.
tokens = torch.tensor(list("".join(topics.values()).encode()))
num_sequences = len(tokens) // SEQ_LENGTH
sequences = tokens[: num_sequences * SEQ_LENGTH].view(num_sequences, SEQ_LENGTH)

# Model: a Llama with random weights.
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=320,
    num_hidden_layers=3,
    num_attention_heads=4,
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

order = torch.randperm(num_sequences)
for step in range(1, STEPS + 1):
    # The model reads all tokens but the last, and predicts all but the first.
    batch = sequences[order[(step - 1) * BATCH_SIZE : step * BATCH_SIZE]]
    logits = model(input_ids=batch[:, :-1]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 1 or step % 10 == 0:
        print(f"step {step:2}  loss {loss.item():.2f}")

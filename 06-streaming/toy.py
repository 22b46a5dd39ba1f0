"""Three documents on two streams: stop after step 2 on one rank, go on with step 3 on two."""

DOCUMENTS = [[f"{name}{i}" for i in range(size)] for name, size in [("a", 12), ("b", 5), ("c", 7)]]
V, G, T = 2, 2, 4  # streams, sequences in a global batch, tokens in a sequence


def cut(stream, first_document, used):
    """Yields the sequences of a stream from a position on, with the position after each."""
    tokens = []
    for number in range(first_document, len(DOCUMENTS)):
        if (number + number // V) % V == stream:  # the documents are dealt to the streams
            for i in range(used if number == first_document else 0, len(DOCUMENTS[number])):
                tokens.append(DOCUMENTS[number][i])
                if len(tokens) == T:
                    yield tokens, (number, i + 1)
                    tokens = []


def train(steps, positions, world_size):
    sequences = [cut(stream, *positions[stream]) for stream in range(V)]
    for step in steps:
        for i in range((step - 1) * G, step * G):
            stream = i % V
            tokens, positions[stream] = next(sequences[stream])
            rank = stream % G % world_size
            print(f"step {step}, sequence {i}, stream {stream}, rank {rank}:", *tokens)


print("without a stop, one rank")
train([1, 2, 3], [(0, 0)] * V, world_size=1)
print("stopped after step 2")
checkpoint = [(0, 0)] * V
train([1, 2], checkpoint, world_size=1)
print("checkpoint:", checkpoint)
print("resumed on two ranks")
train([3], checkpoint, world_size=2)

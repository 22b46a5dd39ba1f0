"""Four documents on two streams: stop after step 2 on one rank, go on with step 3 on two."""

SIZES = {"a": 6, "b": 5, "c": 7, "d": 2}  # tokens of each document
DOCUMENTS = [[f"{name}{i}" for i in range(size)] for name, size in SIZES.items()]
G, T = 2, 4  # sequences of a global batch, which are the streams, and tokens of a sequence


def cut(stream, position):
    """Yields the sequences of a stream from a position on, and the position after each."""
    epoch, start, used = position
    documents = DOCUMENTS[stream::G]
    tokens = []  # those that do not fill a sequence yet
    while True:
        for number in range(start, len(documents)):
            tokens += documents[number][used:]
            used = 0
            while len(tokens) >= T:
                sequence = tokens[:T]
                tokens = tokens[T:]  # the last ones of this document
                yield sequence, [epoch, number, len(documents[number]) - len(tokens)]
        epoch, start = epoch + 1, 0  # the stream begins again


def train(steps, positions, world_size):
    """What the ranks do, one after the other. Returns the positions of the streams after each step.

    Each rank has its own streams, and their positions."""
    sequences = {s: cut(s, positions[s]) for s in range(G)}
    checkpoints = {}
    for step in steps:
        for rank in range(world_size):
            for stream in range(G)[rank::world_size]:
                tokens, positions[stream] = next(sequences[stream])
                print(f"step {step}, rank {rank}, stream {stream}:", *tokens)
        checkpoints[step] = list(positions)
    return checkpoints


print("one rank")
checkpoints = train([1, 2, 3], [[0, 0, 0]] * G, world_size=1)
print("checkpoint of step 2:", checkpoints[2])
print("resumed from it on two ranks")
train([3], checkpoints[2], world_size=2)

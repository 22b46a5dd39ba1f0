"""One process of several that draw batches from the streams of stage 06, as a run would.

Reads scenarios from a JSON file: data, sizes, and a plan of (world size, batches to draw) whose
parts follow one another as runs do, with the positions of the last one as they stand in a
checkpoint. Writes for each batch the sequences that this rank trains on."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from conftest import TINY, data_args, load


def draw(stage, scenario, count, positions):
    """Returns the sequences of each of `count` batches, and the positions after them."""
    args = data_args(scenario["path"], scenario["length"], "text")
    args.global_batch_size = scenario["streams"]
    config = stage.load_config(stage.TINY)
    tokenizer = stage.load_tokenizer(TINY, "")
    documents, _, _ = stage.load_data(args, config, tokenizer)
    streams = stage.Streams(documents, tokenizer, vars(args), config.vocab_size, positions)
    drawn = []
    for _ in range(count):
        indices = streams.next_batch()
        micro_batches, _ = stage.make_micro_batches(
            streams, indices, 2, torch.device("cpu"), dist.group.WORLD
        )
        lengths = torch.tensor([len(micro_batches)])
        dist.all_reduce(lengths, dist.ReduceOp.MAX)
        assert len(micro_batches) == lengths, "collectives would not match"
        rows = [row for ids, targets in micro_batches for row in zip(ids, targets, strict=True)]
        drawn.append([ids.tolist() for ids, targets in rows if targets.max() >= 0])
    return drawn, streams.all_positions(dist.group.WORLD)


def main(scenarios, out, rank):
    stage = load("06-streaming")
    results = []
    for number, scenario in enumerate(json.loads(Path(scenarios).read_text())):
        positions, batches = None, []
        for part, (world_size, count) in enumerate(scenario["plan"]):
            meeting = Path(out, f"meeting-{number}-{part}")
            handed_on = Path(out, f"positions-{number}-{part}")
            if rank < world_size:
                place = {"init_method": f"file://{meeting}", "rank": rank, "world_size": world_size}
                dist.init_process_group("gloo", **place)
                if part > 0:
                    before = Path(out, f"positions-{number}-{part - 1}")
                    positions = json.loads(before.read_text())
                drawn, positions = draw(stage, scenario, count, positions)
                batches += drawn
                if rank == 0:
                    handed_on.write_text(json.dumps(positions))
                dist.barrier()
                dist.destroy_process_group()
            else:
                batches += [[]] * count
            # All meet between two parts: the next one reads what this one left.
            place = {"init_method": f"file://{meeting}-end", "rank": rank, "world_size": 4}
            dist.init_process_group("gloo", **place)
            dist.barrier()
            dist.destroy_process_group()
        results.append(batches)
    Path(out, f"drawn-{rank}").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

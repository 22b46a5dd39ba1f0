"""One process of several that draw batches from the streams of stage 06, as a run would.

Reads scenarios from a JSON file: what Streams takes, and a plan of (world size, batches to draw)
whose parts follow one another as runs do, with the state of the last one as it stands in a
checkpoint. Writes for each batch the sequences that this rank trains on."""

import json
import sys
from pathlib import Path

import datasets
import torch
import torch.distributed as dist
from conftest import load, open_streams


def draw(stage, scenario, rank, world_size, count, state):
    """Returns the sequences of each of `count` batches, and the state behind them."""
    stage.all_gather_object.__globals__["WORLD_SIZE"] = world_size
    documents = datasets.load_dataset("json", data_files=scenario["files"], streaming=True)["train"]
    sizes = [scenario[name] for name in ("length", "streams", "batch", "held_out")]
    streams = open_streams(stage, documents, *sizes)
    streams.open(*state or (0, 0, None))
    drawn = []
    for _ in range(count):
        indices = streams.draw()
        micro_batches, _ = stage.make_micro_batches(streams, indices, 2, torch.device("cpu"))
        lengths = torch.tensor([len(micro_batches)])
        dist.all_reduce(lengths, dist.ReduceOp.MAX)
        assert len(micro_batches) == lengths, "collectives would not match"
        rows = [row for ids, targets in micro_batches for row in zip(ids, targets, strict=True)]
        drawn.append([ids.tolist() for ids, targets in rows if targets.max() >= 0])
    return drawn, streams.state()


def main(scenarios, out, rank):
    stage = load("06-streaming")
    results = []
    for number, scenario in enumerate(json.loads(Path(scenarios).read_text())):
        state, batches = None, []
        for part, (world_size, count) in enumerate(scenario["plan"]):
            meeting = Path(out, f"meeting-{number}-{part}")
            handed_on = Path(out, f"state-{number}-{part}")
            if rank < world_size:
                place = {"init_method": f"file://{meeting}", "rank": rank, "world_size": world_size}
                dist.init_process_group("gloo", **place)
                if part > 0:
                    state = json.loads(Path(out, f"state-{number}-{part - 1}").read_text())
                drawn, state = draw(stage, scenario, rank, world_size, count, state)
                batches += drawn
                if rank == 0:
                    handed_on.write_text(json.dumps(state))
            # All meet between two parts: the next one reads what this one left.
            place = {"init_method": f"file://{meeting}-end", "rank": rank, "world_size": 4}
            if rank < world_size:
                dist.barrier()
                dist.destroy_process_group()
            else:
                batches += [[]] * count
            dist.init_process_group("gloo", **place)
            dist.barrier()
            dist.destroy_process_group()
        results.append(batches)
    Path(out, f"drawn-{rank}").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

"""The rungs of the ladder, and the parent of each.

A rung is its parent plus one idea. No other file says which rung follows which."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PARENTS = {
    "02-ddp": "01-single-gpu",
    "03-fsdp": "02-ddp",
    "04-compression": "03-fsdp",
    "05-multinode": "04-compression",
    "06-streaming": "05-multinode",
    "07-tensor-parallel": "03-fsdp",
    "08-pipeline-parallel": "03-fsdp",
}


def script(rung):
    return ROOT / rung / "train-llm.py"


# A rung whose script is not written yet is left out.
PARENTS = {rung: parent for rung, parent in PARENTS.items() if script(rung).exists()}
RUNGS = ("01-single-gpu", *PARENTS)


def builds_on(rung, other):
    """Whether `rung` is `other`, its child, its child's child, and so on."""
    return rung == other or (rung in PARENTS and builds_on(PARENTS[rung], other))

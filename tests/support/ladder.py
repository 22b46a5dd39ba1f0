"""The rungs of the ladder, and the parent of each.

No other file says which rung follows which. A rung is its parent plus one idea."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FIRST = "01-single-gpu"

FOLDERS = {
    "02-ddp": "01-single-gpu",
    "03-fsdp": "02-ddp",
    "04-compression": "03-fsdp",
    "05-multinode": "04-compression",
    "06-streaming": "05-multinode",
    "07-tensor-parallel": "03-fsdp",
    "08-pipeline-parallel": "03-fsdp",
}
# A rung whose script is not written yet is left out.
PARENTS = {
    rung: parent for rung, parent in FOLDERS.items() if (ROOT / rung / "train-llm.py").exists()
}
RUNGS = (FIRST, *PARENTS)


def script(rung):
    return ROOT / rung / "train-llm.py"

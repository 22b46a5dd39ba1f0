"""The stages of the course, and the parent of each.

A stage is its parent plus one idea. No other file says which stage follows which."""

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


def script(stage):
    return ROOT / stage / "train-llm.py"


# A stage whose script is not written yet is left out.
PARENTS = {stage: parent for stage, parent in PARENTS.items() if script(stage).exists()}
STAGES = ("01-single-gpu", *PARENTS)
# Which stage is compared with which.
PAIRS = [(parent, stage) for stage, parent in PARENTS.items()]


def builds_on(stage, other):
    """Whether `stage` is `other`, its child, its child's child, and so on."""
    return stage == other or (stage in PARENTS and builds_on(PARENTS[stage], other))

"""The stages of the course, and which is compared with which. read.py says which follows which."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from read import PARENTS, STAGES  # noqa: E402, F401 (tests take STAGES from here)


def script(stage):
    return ROOT / stage / "train-llm.py"


# Which stage is compared with which.
PAIRS = [(parent, stage) for stage, parent in PARENTS.items()]


def builds_on(stage, other):
    """Whether `stage` is `other`, its child, its child's child, and so on."""
    return stage == other or (stage in PARENTS and builds_on(PARENTS[stage], other))

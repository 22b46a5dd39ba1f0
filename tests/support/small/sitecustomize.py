"""Put first on a path, this makes each run of a train-llm.py small: its last flags are these, and
the last occurrence of a flag wins. COURSE_SMALL names other ones."""

import os
import sys

if sys.argv[0].endswith("train-llm.py"):
    sys.argv += os.environ.get("COURSE_SMALL", "--max-steps 2 --eval-sequences 4 -s 64").split()

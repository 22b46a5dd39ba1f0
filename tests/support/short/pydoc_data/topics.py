"""A tenth of Python's module of this name, from which the scripts take their default text.

To tokenize all of that takes half of the time of a short run, on each rank. So tests have this
folder on their path, and what they start has it too, except for commands of documents."""

import runpy
import sysconfig
from itertools import islice
from pathlib import Path

path = Path(sysconfig.get_path("stdlib"), "pydoc_data", "topics.py")
all_topics = runpy.run_path(str(path))["topics"]
topics = dict(islice(all_topics.items(), 20))

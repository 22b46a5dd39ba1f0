"""The traps of the chapters, made again as a reader makes them: the tables are the stored ones."""

import re
import subprocess
import sys
import zlib
from pydoc_data.topics import topics

import pytest
import traps
from conftest import ROOT, environment, finish

pytestmark = [pytest.mark.law6, pytest.mark.slow]

STORED = ROOT / "outputs" / "measured"
# These train on the default data, and each release of Python has another text, 3.11.7 another one
# than 3.11.2. With another text only their words are compared.
ON_DEFAULT_DATA = ("bf16-parameters", "initialisation", "optimizer-restored", "pipeline-parallel")
ON_DEFAULT_DATA += ("lines", "context-parallel")
# Of the text of Python 3.11.7.
CRC = 3328411364
SAME_TEXT = zlib.crc32("".join(topics.values()).encode()) == CRC
NUMBER = r"(?<![\w.#])\d+(?:\.\d+)?(?:e-\d+)?"
# What another machine may round otherwise. The seconds of `join` depend on its speed.
TOLERANCE = {"bf16-parameters": 0.15, "initialisation": 0.1, "dct-truncation": 0.1}
TOLERANCE |= {"pipeline-parallel": 0.2, "join": 2.0}


def test_the_tables_are_made_again(tmp_path):
    """`join` waits for most of its time, so it runs beside the others."""
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    how |= {"env": environment(MEASURED=str(tmp_path)), "start_new_session": True}
    command = [sys.executable, str(ROOT / "tests" / "benchmarks" / "traps.py")]
    started = [subprocess.Popen([*command, name], **how) for name in ("join", "all")]
    for result in [finish(process, timeout=1200) for process in started]:
        assert result.returncode == 0, f"{result.out}\n{result.err}"
    made = {path.stem.removeprefix("trap-") for path in tmp_path.iterdir()}
    assert made == set(traps.TRAPS)
    for name in made:
        new, old = ((folder / f"trap-{name}.md").read_text() for folder in (tmp_path, STORED))
        assert re.sub(NUMBER, "N", new) == re.sub(NUMBER, "N", old), f"{new}\n{old}"
        if not SAME_TEXT and name in ON_DEFAULT_DATA:
            continue
        pairs = zip(re.findall(NUMBER, new), re.findall(NUMBER, old), strict=True)
        for one, other in pairs:
            digits = len(other.partition("e")[0].partition(".")[2])
            absolute = 0 if "e" in other else 2 * 10**-digits
            relative = TOLERANCE.get(name, 0.05)
            assert float(one) == pytest.approx(float(other), rel=relative, abs=absolute), new

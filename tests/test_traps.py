"""The traps of the chapters, made again: the tables are the stored ones."""

import re
import subprocess
import sys
import zlib
from pydoc_data.topics import topics

import pytest
import traps
from bench_common import table
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


def make(names, folder):
    """The tables that traps.py writes, as a reader starts it."""
    command = [sys.executable, str(ROOT / "tests" / "benchmarks" / "traps.py"), *names]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    how |= {"env": environment(MEASURED=str(folder)), "start_new_session": True}
    result = finish(subprocess.Popen(command, **how), timeout=1200)
    assert result.returncode == 0, f"{result.out}\n{result.err}"


def compare(name, new, old):
    assert re.sub(NUMBER, "N", new) == re.sub(NUMBER, "N", old), f"{new}\n{old}"
    if not SAME_TEXT and name in ON_DEFAULT_DATA:
        return
    pairs = zip(re.findall(NUMBER, new), re.findall(NUMBER, old), strict=True)
    for one, other in pairs:
        digits = len(other.partition("e")[0].partition(".")[2])
        absolute = 0 if "e" in other else 2 * 10**-digits
        relative = TOLERANCE.get(name, 0.05)
        assert float(one) == pytest.approx(float(other), rel=relative, abs=absolute), new


LONG = ("join", "context-parallel", "pipeline-parallel")
SHORT = [name for name in traps.TRAPS if name not in (*LONG, "lines")]


def stored(name):
    """The lines of a stored table."""
    text = (STORED / f"trap-{name}.md").read_text()
    return [line for line in text.splitlines() if line.startswith("|")]


def test_short_tables_are_made_again(tmp_path):
    make(SHORT, tmp_path)
    for name in SHORT:
        compare(name, *((at / f"trap-{name}.md").read_text() for at in (tmp_path, STORED)))


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.law1) if n == "context-parallel" else n for n in LONG],
)
def test_a_long_table_is_made_again(name):
    """In this process, which has a fork server already. Each mistake in splitting sequences shows
    in losses or norms, which are compared with those of the script as it is, the first row."""
    head, rows = traps.TRAPS[name]()
    compare(name, table(head, rows).strip(), "\n".join(stored(name)))
    if name == "context-parallel":
        (_, *right, _), *others = rows
        for mistake, *wrong, _ in others:
            assert wrong != right, mistake


# Changes after which the losses, norms and evaluations are right: two show elsewhere, one is right.
RIGHT = {
    "the same, and the chunks are gathered in pairs",
    "no `all_reduce(logits, …)` in `sample`",
    "no row of zeros",
}


@pytest.mark.law1
@pytest.mark.parametrize("number", sorted({stage[:2] for stage, *_ in traps.LINES}))
def test_the_lines_of_a_stage_are_made_again(number):
    """They are those rows of the stored table that begin with its number, or follow one. Whoever
    compares the numbers with those of the stage as it is notices each line that is broken."""
    old, is_own = stored("lines")[:2], False
    for row in stored("lines")[2:]:
        if not row.startswith("|  |"):
            is_own = row.startswith(f"| {number}, ")
        if is_own:
            old.append(row)
    head, rows = traps.lines(number)
    compare("lines", table(head, rows).strip(), "\n".join(old))
    for _, change, *numbers in rows:
        if change == "as it is":
            expected = numbers
        else:
            assert (numbers == expected) == (change in RIGHT), change

"""Random kills, stops and rung changes over one run, and random inputs: see tests/support/fuzz.py.

Here for a bounded number of starts. For longer: `python tests/support/fuzz.py kills --minutes 10`.
"""

import fuzz
import pytest


@pytest.mark.law1
@pytest.mark.law3
@pytest.mark.law4
@pytest.mark.slow
def test_random_kills_of_one_run():
    """No checkpoint is lost, and the curve is the uninterrupted one. The last start may finish."""
    counts = fuzz.attack_kills(0, seed=7, rounds=12)
    assert counts["violations"] == 0
    assert counts["runs finished"] == 1
    assert counts["kill -9"] + counts["SIGTERM, SIGINT"] >= 1


@pytest.mark.slow
def test_random_inputs():
    """Each ends with 0, or in exactly one line."""
    counts = fuzz.attack_inputs(0, seed=7, count=60)
    assert counts["violations"] == 0
    assert counts["trained"] > 0
    assert counts["refused in one line"] > 0


def test_the_attack_finds_what_does_not_hold():
    """A violation is seen: two lines, none, a traceback, a file that changed, no end."""
    line = "train-llm.py: error: a\n"
    both = {"inputs/a": 1}
    assert fuzz.violations("rows", 2, line, both, both) == []
    assert fuzz.violations("rows", 2, line + "train-llm.py: error: b\n", both, both)
    assert fuzz.violations("rows", 1, "", both, both)
    traceback = 'File "train-llm.py", line 3\nValueError\n'
    assert fuzz.violations("rows", 1, line + traceback, both, both)
    assert fuzz.violations("rows", 0, "", both, {"inputs/a": 2})
    assert fuzz.violations("rows", 0, "", both, {})
    assert fuzz.violations("rows", None, "", both, both)

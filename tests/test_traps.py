"""Mutants: each line that traps.toml breaks is noticed by whoever compares two curves (law 1)."""

import re

import pytest
import traps
from conftest import assert_same_curve

pytestmark = pytest.mark.law1

# Changes after which the losses, norms and evaluations are right: two show elsewhere, one is right.
RIGHT = {
    "the same, and the chunks are gathered in pairs",
    "no `all_reduce(logits, …)` in `sample`",
    "no row of zeros",
}
QUICK = {"the targets of a rank, doubled", "each rank initialises its shards"}
# Flags that stage 01 does not have.
OWN = r"--(compression|shard-size|stages|tensor-size) \S+|--no-reshard-after-forward"
MUTANTS = [
    pytest.param(run, change, id=f"{run['stage'][:2]}: {change}", marks=() if is_quick else slow)
    for slow in [pytest.mark.slow]
    for run in traps.RUNS
    for change in run.get("changes", {})
    for is_quick in [change in QUICK]
]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Runs a script, once if it has no edits. Returns its metrics, empty after an error."""
    folder = traps.write_inputs(tmp_path_factory.mktemp("traps"))
    done = {}

    def metrics_of(stage, processes, flags, edits=()):
        key = (stage, processes, flags, str(edits))
        if key not in done:
            place = folder / f"run-{len(done)}"
            done[key], _ = traps.train(folder, place, stage, processes, flags, edits)
        return done[key]

    return metrics_of


@pytest.mark.parametrize(("run", "change"), MUTANTS)
def test_a_broken_line_is_noticed(train, run, change):
    """The script as it is passes the comparison, and the one with a broken line fails it, unless
    its run ends with an error."""
    stage, processes, flags = run["stage"], run["processes"], run["flags"]
    # Shorter than the runs of the table, which are to be read.
    flags = re.sub(r"--max-steps ([3-9]|\d\d)\b", "--max-steps 5", flags) + " --eval-sequences 16"
    right = train(stage, processes, flags)
    # Where a stage computes what 01 does, that is the other side. A compressed curve, one of a
    # stream, or one of a mixture, whose routes may flip, is compared with itself.
    compressed = stage == "04-compression" and "none" not in flags
    is_own = compressed or stage.startswith(("01", "06", "10"))
    one = right if is_own else train("01-single-gpu", 1, re.sub(OWN, "", flags))
    how = {"learns": len(right) > 2, "cut": stage == "02-ddp"}
    assert_same_curve(one, right, right, **how)
    broken = train(stage, processes, flags, run["changes"][change])
    if change in RIGHT:
        assert_same_curve(one, broken, right, learns=how["learns"], rel_norm=1e-3)
    elif broken:
        with pytest.raises(AssertionError):
            assert_same_curve(one, broken, right, **how)


DEAD = [("        scaler.step(optimizer)\n", "        pass\n")]


def test_two_runs_that_learn_nothing_are_not_the_same_experiment(train):
    """Without `scaler.step` stages 01 and 02 agree, to the last digits."""
    flags = "-s 64 --max-steps 8"
    one, other = train("01-single-gpu", 1, flags, DEAD), train("02-ddp", 2, flags, DEAD)
    assert_same_curve(one, other, one, learns=False)
    with pytest.raises(AssertionError, match="learn nothing"):
        assert_same_curve(one, other, one)

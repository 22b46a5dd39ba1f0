"""Single lines of the scripts, left out or changed, and what a run logs then.

    python tests/benchmarks/traps.py 02    trains stage 02 with each of its mistakes, one at a time
    python tests/benchmarks/traps.py       all stages; writes outputs/measured/trap-lines.md

traps.toml has the lines. Most of these mistakes raise no error, and some do not show in the loss.
tests/test_traps.py holds that each of them is noticed by whoever compares the curve with that of
the right script.
"""

import os
import re
import sys
import tempfile
import tomllib
from pathlib import Path

# When this is started as a script: where conftest.py is, and what is in tests/support.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
sys.path.insert(2, str(Path(__file__).resolve().parents[1] / "support"))

try:
    import pytest  # noqa: F401 (conftest.py needs it)
except ImportError:
    sys.exit("traps.py shares code with the tests. Once: pip install -e '.[test]'")

from bench_common import MEASURED, STAGE_10, table, write_model
from conftest import metrics, mutant, run, save_config, save_masked

RUNS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["run"]
# A collective of a broken copy that waits for longer than this fails.
IMPATIENT = ("timedelta(hours=12)", "timedelta(seconds=60)")


def write_inputs(folder):
    """The models and data that the flags of traps.toml name, in a folder, that of the runs."""
    # Like tiny, but two heads of queries share a head of keys and values.
    sizes = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 320}
    sizes |= {"num_hidden_layers": 3, "num_key_value_heads": 2, "tie_word_embeddings": True}
    write_model(folder / "grouped", **sizes)
    sizes |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    write_model(folder / "tied", **sizes, pad_token_id=0)
    save_config(folder / "mixture", "mixture")
    save_masked(folder / "masked")
    return folder


def train(folder, place, stage, processes, flags, edits=()):
    """Runs a stage with pieces of its text replaced.

    Args:
        folder (Path): what `write_inputs` has written.
        place (Path): a folder that is not there yet, for the copy of the script and its run.
        stage, processes, flags: those of a run of traps.toml; edits: one of its changes.

    Returns:
        The metrics by step, which are empty if the run ended with an error, and how it ended."""
    bounds = [IMPATIENT] if edits and stage == STAGE_10 else []
    path = mutant(place, stage, *bounds, *edits)
    more = ["--log-freq", 1, "-e", "a", "--save-dir", place]
    result = run(stage, processes, *flags.split(), *more, path=path, cwd=folder, check=not edits)
    return (metrics(place / "a") if result.returncode == 0 else {}), result


def columns(found, result):
    """The numbers of a row of the table, or the error with which the run ended."""
    if result.returncode != 0:
        errors = re.findall(r"\b\w+Error: .+", result.err)
        return [f"an error: {errors[-1] if errors else result.returncode}", *["–"] * 4]
    first, last = found[1], found[max(found)]
    numbers = []
    for step in (first, last):
        numbers += [f"{step['train/loss']:.4f}", f"{step['train/grad_norm']:.3f}"]
    return [*numbers, f"{last['eval/loss']:.4f}"]


def main(number=""):
    runs = [run for run in RUNS if run["stage"].startswith(number)]
    if not runs:
        sys.exit(f"traps.py: error: no stage begins with {number}\n\n{__doc__}")
    head = ["stage, processes, flags", "change", "loss, step 1", "gradient norm, step 1"]
    head += ["loss, last step", "gradient norm, last step", "eval/loss"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("COURSE_HF_HOME", folder)
        folder = write_inputs(Path(folder))
        for one in runs:
            what = one["stage"], one["processes"], one["flags"]
            where = f"{what[0][:2]}, {what[1]} × `{what[2]}`"
            for change, edits in {"as it is": [], **one.get("changes", {})}.items():
                result = train(folder, folder / str(len(rows)), *what, edits)
                rows.append([where, change, *columns(*result)])
                where = ""
    text = table(head, rows)
    print(text, flush=True)
    if not number:
        MEASURED.mkdir(exist_ok=True)
        (MEASURED / "trap-lines.md").write_text(f"`python tests/benchmarks/traps.py`\n\n{text}")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""compare.py: one table and one picture of several runs."""

import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT, environment

STEP = {
    "throughput/tokens_per_second": 1000.0,
    "memory/peak_gb": 0.5,
    "memory/state_gb": 0.25,
    "time/data_ms": 1.0,
    "time/forward_ms": 20.0,
    "time/backward_ms": 40.0,
    "time/update_ms": 5.0,
    "time/total_ms": 66.0,
}


def write_run(folder, losses, last=None, **more):
    """A run whose steps have these losses. `last` has more metrics of the last step."""
    folder.mkdir(parents=True)
    lines = []
    for step, loss in enumerate(losses, start=1):
        lines.append({"step": step, "train/loss": loss, **STEP, **more})
    lines[0]["throughput/tokens_per_second"] = 1.0  # the first step is slow, and does not count
    lines[-1] |= last or {}
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def compare(*arguments):
    command = [sys.executable, ROOT / "compare.py", *arguments]
    return subprocess.run(
        map(str, command), env=environment(), capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def two_runs(tmp_path):
    one = write_run(tmp_path / "one", [5.0, 4.0, 3.0], {"eval/loss": 2.5})
    two = write_run(tmp_path / "two", [5.0, 4.5, 3.5], **{"comm/bytes_per_step": 2_500_000})
    return one, two


def test_the_table_has_what_the_runs_have_logged(two_runs, tmp_path):
    """The last loss, the median speed without the first step, memory. A dash: not logged."""
    result = compare(*two_runs, "--picture", tmp_path / "p.svg")
    assert result.returncode == 0, result.stderr
    rows = [line.strip("| ").split(" | ") for line in result.stdout.splitlines() if "|" in line]
    table = {row[0]: dict(zip(rows[0][1:], row[1:], strict=True)) for row in rows[2:]}
    one = {"steps": "3", "train/loss": "3.0000", "eval/loss": "2.5000", "tokens/s": "1,000"}
    one |= {"step, ms": "66.0", "peak memory, GB": "0.500", "state, GB": "0.250"}
    assert table["one"] == one | {"sent per step, MB": "–"}
    assert table["two"]["train/loss"] == "3.5000"
    assert table["two"]["eval/loss"] == "–"
    assert table["two"]["sent per step, MB"] == "2.50"


def test_a_run_that_diverged_is_not_shown_as_a_good_one(tmp_path):
    run = write_run(tmp_path / "one", [5.0, float("nan"), float("nan")])
    (tmp_path / "notes.md").write_text("of outputs/*")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "train/lo')  # a kill has cut it
    result = compare(run, tmp_path / "notes.md", "--picture", tmp_path / "p.svg")
    assert "| one | 3 | nan |" in result.stdout


def test_the_picture_has_each_run(two_runs, tmp_path):
    pytest.importorskip("matplotlib")
    result = compare(*two_runs, "--picture", tmp_path / "p.svg")
    assert f"picture: {tmp_path}/p.svg" in result.stdout
    drawn = (tmp_path / "p.svg").read_text()
    for text in ("one", "two", "train/loss", "tokens/s", "not logged", "2.50", "backward"):
        assert f">{text}<" in drawn


def test_comet_shows_the_runs_together(two_runs, tmp_path):
    """One link for runs that were logged online, one command for those that were not."""
    for run, key in zip(two_runs, "ab", strict=True):
        (run / "comet").mkdir()
        (run / "comet.txt").write_text(f"https://www.comet.com/me/train-llm/{key * 32}\n")
    result = compare(*two_runs, "--picture", tmp_path / "p.svg")
    keys = f"{'a' * 32},{'b' * 32}"
    assert "https://www.comet.com/me/train-llm/compare?" in result.stdout
    assert f"experiments={keys}&" in result.stdout
    assert "comet upload" not in result.stdout
    (two_runs[0] / "comet" / "x.zip").write_text("")
    result = compare(*two_runs, "--picture", tmp_path / "p.svg")
    assert f"comet upload {two_runs[0]}/comet/x.zip" in result.stdout


@pytest.mark.law5
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "is not the folder of a run"),
        ("", "has no line with a train/loss"),
        ('{"step": 1, "eval/loss": 2.0}\n', "has no line with a train/loss"),
        ("{", "has no line with a train/loss"),
        ("x}\n", "metrics.jsonl: "),
    ],
)
def test_bad_input_ends_in_one_line(content, problem, tmp_path):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    result = compare(tmp_path)
    assert result.returncode == 2
    [line] = result.stderr.splitlines()
    assert line.startswith("compare.py: error: ")
    assert problem in line
    assert str(tmp_path) in line


@pytest.mark.law6
def test_the_readme_links_what_was_measured():
    """The table is what compare.py printed for the five runs of README."""
    _, table = (ROOT / "outputs" / "measured" / "compare.md").read_text().split("\n\n", 1)
    text = (ROOT / "README.md").read_text()
    assert "(outputs/measured/compare.md)" in text
    runs = [line.split()[1] for line in table.splitlines() if line.startswith("| compare-0")]
    assert runs == re.findall(r"-e (compare-0\d)", text)

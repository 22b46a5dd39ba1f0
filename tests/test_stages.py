"""Law 2: one diff, one idea."""

import ast
import os
import subprocess
import sys

import pytest
from stages import PAIRS, ROOT, STAGES, script

# Functions and classes that a stage adds: the idea itself.
NEW = {
    "02-ddp": ["share_of_rank"],
    "03-fsdp": ["send_weights"],
    "04-compression": ["ReplicaAverage", "pad", "low_frequencies", "to_int8"],
    "05-multinode": ["newest_metrics", "BackgroundWriter"],
    "06-streaming": ["Streams", "find_files", "read_files"],
    "07-tensor-parallel": ["split_layers"],
    "08-pipeline-parallel": [
        "PipelineStage",
        "keep_stage",
        "PassThrough",
    ],
    "09-context-parallel": [
        "split_attention",
        "attend",
        "make_no_mask",
        "gather_tokens",
        "own_chunks",
        "own_positions",
    ],
    "10-expert-parallel": ["split_experts", "choose_dimension", "compute_in_group", "AllToAll"],
}
# Functions that a stage does not need any more.
DROPPED = {}
# Functions that a stage changes. The others are as on the stage below.
CHANGED = {
    "02-ddp": ["main", "make_micro_batches", "evaluate"],
    "03-fsdp": ["main", "parse_args"],
    "04-compression": ["main", "parse_args"],
    "05-multinode": ["main", "parse_args"],
    "06-streaming": ["main", "load_data", "check_data", "parse_args"],
    "07-tensor-parallel": ["main", "sum_cross_entropy", "sample", "parse_args"],
    "08-pipeline-parallel": [
        "main",
        "evaluate",
        "sample",
        "send_weights",
        "parse_args",
    ],
    "09-context-parallel": ["main", "evaluate", "sample", "parse_args"],
    "10-expert-parallel": ["main", "parse_args"],
}


def functions(stage):
    """The source of each function and class of a stage, by name, in order."""
    text = script(stage).read_text()
    kinds = (ast.FunctionDef, ast.ClassDef)
    nodes = [node for node in ast.parse(text).body if isinstance(node, kinds)]
    return {node.name: ast.get_source_segment(text, node) for node in nodes}


def diff(below, stage):
    """The lines that `diff` prints."""
    command = ["diff", script(below), script(stage)]
    return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()


def git_diff(below, stage, *options):
    """What the `git diff` of a chapter prints, whatever the user's configuration of git is."""
    command = ["git", "diff", "--no-index", "--no-color", "--no-ext-diff", *options]
    variables = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    files = [script(below), script(stage)]
    return subprocess.run([*command, *files], env=variables, capture_output=True, text=True).stdout


def changed_lines(below, stage):
    """The lines that `git diff` marks on either side, comments and docstring counted."""
    return sum(int(number) for number in git_diff(below, stage, "--numstat").split()[:2])


@pytest.mark.law2
@pytest.mark.parametrize(("below", "stage"), PAIRS)
def test_functions_that_an_idea_is_not_in_are_the_same(below, stage):
    lower, upper = functions(below), functions(stage)
    new, dropped = NEW.get(stage, []), DROPPED.get(stage, [])
    assert new == [name for name in upper if name not in lower]
    assert dropped == [name for name in lower if name not in upper]
    kept = [name for name in upper if name not in new]
    assert [name for name in lower if name in kept] == kept, "the same functions in the same order"
    changed = {name for name in kept if upper[name] != lower[name]}
    assert changed == set(CHANGED[stage])


@pytest.mark.law2
@pytest.mark.parametrize(("below", "stage"), PAIRS)
def test_no_line_is_merely_moved(below, stage):
    """A line that stands in both is not among the changed ones, but for brackets. Within a hunk it
    may be indented otherwise: what stood in a `with` block of the stage below."""
    removed, added = {}, {}
    hunk = 0
    for line in diff(below, stage):
        if line[0] in "<>":
            (removed if line[0] == "<" else added)[line[2:]] = hunk
        elif line[0] in "0123456789":
            hunk += 1
    removed = {line: hunk for line, hunk in removed.items() if line.strip(" ()[]{},")}
    assert not removed.keys() & added.keys()
    for line, hunk in removed.items():
        if len(line.strip()) < 12:  # such as `else:`
            continue
        elsewhere = [other for other in added if other.strip() == line.strip()]
        assert not elsewhere or any(added[other] == hunk for other in elsewhere), line


@pytest.mark.law2
@pytest.mark.parametrize("stage", STAGES)
def test_a_script_imports_no_other_stage(stage):
    """Standard library, its packages, and the one shared module, that of its own clone."""
    allowed = set(sys.stdlib_module_names) | {"pydoc_data", "logs_and_checkpoints"}
    allowed |= {"torch", "transformers", "datasets", "numpy", "pyarrow"}
    for node in ast.walk(ast.parse(script(stage).read_text())):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= allowed
        if isinstance(node, ast.ImportFrom):
            assert node.module.split(".")[0] in allowed


@pytest.mark.law2
def test_comments_stay_on_higher_stages():
    """A comment is written where its line first appears; no stage drops one with its line kept."""
    for below, stage in PAIRS:
        lower = script(below).read_text().splitlines()
        upper = script(stage).read_text().splitlines()
        for comment, line in zip(lower, lower[1:], strict=False):
            is_code = not line.strip().startswith("#")  # within a comment a line may change
            if comment.strip().startswith("#") and is_code and line in upper:
                assert comment in upper, comment


@pytest.mark.law6
def test_the_readme_has_the_true_counts():
    text = (ROOT / "README.md").read_text()
    parents = {stage: below for below, stage in PAIRS}
    for stage in STAGES:
        below = parents.get(stage)
        row = next(line for line in text.splitlines() if line.startswith(f"| [{stage}]"))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[-2] == str(len(script(stage).read_text().splitlines()))
        assert cells[-1] == (str(changed_lines(below, stage)) if below else "")


def test_ruff_is_content():
    for command in (["check", "-q"], ["format", "-q", "--check"]):
        result = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stdout

"""Law 2: one diff, one idea."""

import ast
import os
import subprocess
import sys

import pytest
from stages import PAIRS, ROOT, STAGES, script


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
@pytest.mark.parametrize(("below", "stage"), PAIRS)
def test_a_stage_keeps_the_functions_of_its_parent_in_their_order(below, stage):
    lower, upper = (
        [node.name for node in ast.parse(script(name).read_text()).body if hasattr(node, "name")]
        for name in (below, stage)
    )
    assert [name for name in upper if name in lower] == lower


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
@pytest.mark.parametrize(("below", "stage"), PAIRS)
def test_comments_stay_on_higher_stages(below, stage):
    """A comment is written where its line first appears; no stage drops one with its line kept."""
    lower = script(below).read_text().splitlines()
    upper = script(stage).read_text().splitlines()
    for comment, line in zip(lower, lower[1:], strict=False):
        is_code = not line.strip().startswith("#")  # within a comment a line may change
        if comment.strip().startswith("#") and is_code and line in upper:
            assert comment in upper, comment


@pytest.mark.law6
@pytest.mark.parametrize("stage", STAGES)
def test_the_readme_has_the_true_counts(stage):
    """So a change of one line more than its author thinks, in a stage or in its parent, is seen."""
    below = {stage: below for below, stage in PAIRS}.get(stage)
    lines = (ROOT / "README.md").read_text().splitlines()
    row = next(line for line in lines if line.startswith(f"| [{stage}]"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[-2] == str(len(script(stage).read_text().splitlines()))
    assert cells[-1] == (str(changed_lines(below, stage)) if below else "")


def test_ruff_is_content():
    for command in (["check", "-q"], ["format", "-q", "--check"]):
        result = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stdout

"""Law 2: one diff, one idea. And the budgets: a file that must be read in one sitting."""

import ast
import os
import re
import subprocess
import sys

import pytest
from stages import PAIRS, PARENTS, ROOT, STAGES, script

# Functions and classes that a stage adds: the idea itself.
NEW = {
    "02-ddp": ["share_of_rank"],
    "03-fsdp": ["send_weights"],
    "04-compression": ["ReplicaAverage", "pad", "low_frequencies", "to_int8"],
    "05-multinode": ["newest_metrics", "finish_save"],
    "06-streaming": ["Streams", "is_held_out"],
    "07-tensor-parallel": ["split_layers"],
    "08-pipeline-parallel": [
        "PipelineStage",
        "keep_stage",
        "PassThrough",
        "forward_pass",
        "forward_through_stages",
    ],
}
# Functions that a stage does not need any more.
DROPPED = {"08-pipeline-parallel": ["loss_sum"]}
# Functions that a stage changes, and why its idea is in them. The others are as on the stage below.
CHANGED = {
    "02-ddp": {
        "main": "the process group, the wrapper, the reductions",
        "make_micro_batches": "each rank takes its share of the global batch",
        "evaluate": "the sums of all ranks make the loss",
    },
    "03-fsdp": {
        "main": "meta device, sharding, mixed precision of FSDP, when to gather",
        "evaluate": "the root is gathered and no backward frees it",
        "sample": "the same",
        "parse_args": "--cpu-offload, --no-reshard-after-forward",
    },
    "04-compression": {
        "main": "the mesh of replicas and shards, the hook, what it sent",
        "parse_args": "its flags",
    },
    "05-multinode": {
        "main": "timeouts, the clean stop, checkpoints in the background",
        "parse_args": "--timeout, and the default of --shard-size",
    },
    "06-streaming": {
        "main": "batches come from streams, whose positions are saved",
        "load_data": "documents that stream",
        "load_files": "the same",
        "choose_column": "it takes no rows of tokens, such as those of prepare.py",
        "check_data": "the files are not read before the training",
        "parse_args": "a stream has no end",
    },
    "07-tensor-parallel": {
        "main": "the mesh of tensor groups, the layers split",
        "loss_sum": "the logits are split",
        "sample": "the same",
        "parse_args": "--tensor-size",
    },
    "08-pipeline-parallel": {
        "main": "the pipeline stages, the schedule, what they exchange",
        "send_weights": "a pipeline stage takes a part of the weights",
        "evaluate": "the forward pass goes through the pipeline stages",
        "sample": "the same",
        "parse_args": "--stages, --schedule",
    },
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
def test_count_the_changed_lines(below, stage, capsys):
    """There is no limit: a diff is as long as its idea takes. The count is printed."""
    count = changed_lines(below, stage)
    with capsys.disabled():
        print(f"\n{below} -> {stage}: {count} changed lines")
    assert count > 0


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
    allowed |= {"torch", "transformers", "datasets", "numpy", "tokenizers"}
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


@pytest.mark.law2
def test_the_readmes_tree_has_each_stage_under_its_parent():
    """And each chapter of a stage that does not follow the one before it names its parent."""
    tree = (ROOT / "README.md").read_text().split("```mermaid")[1].split("```")[0]
    names = dict(re.findall(r'(\w+)\["([^"]+)"\]', tree))
    parents = {}
    for line in re.sub(r'\["[^"]+"\]', "", tree).splitlines()[2:]:
        chain = [names[letter.strip()] for letter in line.split("-->")] if "-->" in line else []
        parents |= dict(zip(chain[1:], chain, strict=False))
    assert parents == PARENTS
    for before, stage in zip(STAGES, STAGES[1:], strict=False):
        if PARENTS[stage] != before:
            parent = PARENTS[stage]
            chapter = " ".join((ROOT / stage / "README.md").read_text().split())
            assert f"builds on [stage {parent[:2]}](../{parent}/README.md)" in chapter


@pytest.mark.law6
def test_tables_in_prose_are_those_that_were_measured():
    """What benchmark.py and traps.py wrote to outputs/measured stands in a README word for word."""
    measured = ROOT / "outputs" / "measured"
    documents = [ROOT / "README.md", measured / "README.md", *ROOT.glob("*/README.md")]
    documents += ROOT.glob("*/deeper.md")
    prose = "".join(path.read_text() for path in documents)
    tables = set(measured.glob("*.md")) - {measured / "README.md"}
    assert tables
    for path in tables:
        assert path.read_text() in prose, path


def test_no_new_marks():
    for stage in STAGES:
        assert "# NEW" not in script(stage).read_text()


def test_the_tree():
    """What stands at the top is what the README says stands there."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode != 0:
        pytest.skip("not a git checkout")
    top = {line.split("/")[0] for line in tracked.stdout.splitlines()}
    expected = {
        "README.md",
        "GLOSSARY.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "pyproject.toml",
        ".gitignore",
    }
    expected |= {"logs_and_checkpoints.py", "prepare.py"}
    expected |= {"compare.py", "outputs", "tests", ".ci", ".github"}
    assert top == expected | set(STAGES)


def test_ruff_is_content():
    for command in (["check", "-q"], ["format", "-q", "--check"]):
        result = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stdout

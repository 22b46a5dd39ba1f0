"""What the README and the chapters say is so: their commands run, what they quote is there.

A check takes a document's name and its text, and returns what is wrong in it. The last test gives
each check a text with that fault."""

import ast
import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from itertools import groupby
from pathlib import Path

import benchmark
import commands
import pytest
import traps
from conftest import ROOT, STAGES, SUPPORT, environment, finish, fork, load, script
from stages import PAIRS
from test_stages import changed_lines, git_diff
from test_traps import SAME_TEXT

pytestmark = pytest.mark.law6

BELOW = {stage: below for below, stage in PAIRS}
CHAPTERS = [f"{stage}/README.md" for stage in STAGES]
# The second file of a chapter: what is not on its main path.
DEEPER = [f"{stage}/deeper.md" for stage in STAGES if (ROOT / stage / "deeper.md").exists()]
# What read.py shows below single lines.
NOTES = [f"{stage}/notes.md" for stage in STAGES]
MEASUREMENTS = "outputs/measured/README.md"
GLOSSARY = "GLOSSARY.md"
DOCUMENTS = ["README.md", "GUIDE.md", "CONTRIBUTING.md", "outputs/README.md"]
DOCUMENTS += [MEASUREMENTS, GLOSSARY, *CHAPTERS, *DEEPER, *NOTES]
TOYS = {stage: ROOT / stage / "toy.py" for stage in STAGES}
TOYS["01-single-gpu"] = ROOT / "01-single-gpu" / "skeleton.py"
TEXTS = {name: (ROOT / name).read_text() for name in DOCUMENTS if (ROOT / name).exists()}
SMALL = SUPPORT / "small"

# Flags of other programs.
LAUNCHERS = "--standalone --nproc-per-node --nnodes --node-rank --master-addr --master-port"
LAUNCHERS += " --max-restarts --local-addr --rdzv-backend --rdzv-conf --rdzv-endpoint --rdzv-id"
LAUNCHERS += " --no-index --no-build-isolation --logdir --job-name --help --dist --base --partly"
LAUNCHERS += " --index-url --picture --additional-suffix --signals-to-handle --mem --time"
for program in ("plan.py", "prepare.py", "compare.py", "read.py", "05-multinode/submit.py"):
    parser = (ROOT / program).read_text().rpartition("ArgumentParser(")[2]
    LAUNCHERS += " " + " ".join(re.findall(r'"(--[a-z-]+)"', parser))


def stage_of(name):
    """The stage to whose chapter a document belongs. None for others."""
    return name.split("/")[0] if name in (*CHAPTERS, *DEEPER, *NOTES) else None


def fences(text, language):
    """The bodies of the fenced blocks with that info string."""
    found = re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [body for info, body in found if info.strip() == language]


def prose(text):
    """What is not in a fenced block."""
    return re.sub(r"^```[^\n]*\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def shell_lines(text):
    """The lines of all shell blocks, those that go on behind a backslash joined."""
    blocks = fences(text, "bash") + fences(text, "bash run")
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


# Commands.


def copy_of_the_repository(folder):
    """What git has, or would take; runs and environments of the developer's are not copied."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if names.returncode != 0:
        pytest.skip("not a git checkout")
    for name in names.stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


def bash(block, folder, programs):
    """Runs a block as it stands, with `python` and `torchrun` of support/commands.py, small runs
    (support/small)."""
    variables = environment(PYTHONPATH=str(SMALL))
    interpreter = Path(sys.executable).parent
    variables["PATH"] = os.pathsep.join(map(str, [programs, interpreter, variables["PATH"]]))
    how = {"cwd": folder, "env": variables, "stdin": subprocess.DEVNULL, "text": True}
    how |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    return finish(subprocess.Popen(["bash", "-ec", block], **how))


@pytest.fixture(scope="module")
def programs():
    with (
        tempfile.TemporaryDirectory() as folder,
        commands.programs(Path(folder, "bin"), fork) as bin,
    ):
        yield bin


# Each block of these two stands alone. The blocks of a chapter are run in order, by one test.
ALONE = ("README.md", "GUIDE.md")
BLOCKS = [(name, [n]) for name in ALONE for n in range(len(fences(TEXTS[name], "bash run")))]
BLOCKS += [(name, list(range(len(fences(TEXTS[name], "bash run"))))) for name in CHAPTERS + DEEPER]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "numbers"), BLOCKS)
def test_commands_run(name, numbers, tmp_path, programs):
    """Word for word, from the root of a copy of the repository."""
    folder = copy_of_the_repository(tmp_path / "course")
    for number in numbers:
        block = fences(TEXTS[name], "bash run")[number]
        result = bash(block, folder, programs)
        assert result.returncode == 0, f"{block}\n{result.out}\n{result.err}"


# Code.


@cache
def full_diff(below, stage):
    """The lines of `git diff --no-index` with all of the context, without its head."""
    lines = [line.rstrip() for line in git_diff(below, stage, "-U100000").splitlines()]
    return lines[1 + next(n for n, line in enumerate(lines) if line.startswith("@@")) :]


def places(block, lines, start=0):
    """The index in `lines` of each quoted line; None if they are not there in this order. A line
    `...` stands for those left out, and between two of them nothing is."""
    found = []
    quoted = [line.rstrip() for line in block.splitlines()]
    for left_out, part in groupby(quoted, lambda line: line.strip() == "..."):
        if not left_out:
            part = list(part)
            tries = range(start, len(lines) - len(part) + 1)
            first = next((i for i in tries if lines[i : i + len(part)] == part), None)
            if first is None:
                return None
            start = first + len(part)
            found += range(first, start)
    return found


def wrong_quotes(name, text):
    """Lines in ```diff and ```python blocks that are not those of the chapter's stage."""
    stage, problems = stage_of(name), []
    diff = full_diff(BELOW[stage], stage) if stage in BELOW else full_diff(*PAIRS[0])
    for block in fences(text, "diff"):
        if places(block, diff) is None:
            problems.append(f"{name}: not so in the diff:\n{block}")
    sources = [script(stage), TOYS[stage]] if stage else [script(STAGES[0])]
    sources += [ROOT / "logs_and_checkpoints.py"]
    sources = [path.read_text().splitlines() for path in sources]
    for block in fences(text, "python"):
        if not stage and not block.startswith(" "):  # a program of its own
            continue
        if all(places(block, lines) is None for lines in sources):
            problems.append(f"{name}: not so in the scripts:\n{block}")
    return problems


def unexplained_hunks(name, text):
    """Hunks of a stage's diff without a new comment or docstring and without a note in `text`.

    Lines of imports, docstrings, flags and signatures need none. A note that asks why something
    is gone explains all removed lines that name it."""
    stage = stage_of(name)
    if name not in NOTES or stage not in BELOW:
        return []
    old, new = script(BELOW[stage]), script(stage)
    headings = [heading.strip("`") for heading in re.findall("^## (.*)", text, re.MULTILINE)]
    lines = [line.strip() for line in new.read_text().splitlines()]
    noted = {line for line in lines if any(heading in line for heading in headings)}
    questions = re.findall("^Why .* gone\\?$", text, re.MULTILINE)
    gone = {name for question in questions for name in re.findall("`(.*?)`", question)}
    plain, docstrings = zip(plain_lines(old), plain_lines(new), strict=True)
    problems = []
    for hunk in re.split("^@@ -", git_diff(BELOW[stage], stage, "-U1"), flags=re.MULTILINE)[1:]:
        head, *lines = hunk.rstrip().split("\n")
        first = re.match(r"(\d+)\S* \+(\d+)", head)
        numbers = [int(first[1]), int(first[2])]
        is_explained, changed = False, []
        for line in lines:
            mark, code = line[:1], line[1:].strip()
            side = 0 if mark == "-" else 1
            if mark == "+":
                is_explained |= re.search("(^|  )# ", code) is not None
                is_explained |= numbers[1] in docstrings[1]
            if mark == "-":
                is_explained |= any(name in code for name in gone)
            else:
                is_explained |= code in noted
            if mark != " " and code and numbers[side] not in plain[side] | docstrings[side]:
                changed.append(line)
            numbers[0] += mark != "+"
            numbers[1] += mark != "-"
        if changed and not is_explained:
            problems.append(f"{name}: no comment and no note explains\n" + "\n".join(changed))
    return problems


def plain_lines(path):
    """Numbers of the lines of imports, flags and signatures, and of docstrings."""
    plain, docstrings = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        lines = range(getattr(node, "lineno", 0), getattr(node, "end_lineno", 0) + 1)
        if isinstance(node, ast.Import | ast.ImportFrom):
            plain |= set(lines)
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            first = node.body[0]
            plain |= set(range(lines.start, first.lineno))
            if getattr(node, "name", "") == "parse_args":
                plain |= set(lines)
            if ast.get_docstring(node):
                docstrings |= set(range(first.lineno, first.end_lineno + 1))
    return plain, docstrings


def unmeasured(name, text):
    """Numbers with three or more decimals in notes to which no measured number can be rounded.

    Those of the script itself, such as a default, are not measured."""
    if name not in NOTES:
        return []
    number = r"(?<![\w.])\d+\.\d{3,}\b"
    tables = " ".join(path.read_text() for path in measured("*.md"))
    known = [float(found) for found in re.findall(r"(?<![\w.])\d+\.\d+\b", tables)]
    source = script(stage_of(name)).read_text()
    problems = []
    for found in sorted(set(re.findall(number, re.sub(r"\]\([^)]*\)", "", text)))):
        if found in source:
            continue
        decimals = len(found.partition(".")[2])
        if not any(round(value, decimals) == float(found) for value in known):
            problems.append(f"{name}: no file of outputs/measured has {found}")
    return problems


def wrong_counts(name, text):
    """`NN changed lines` that are not so, in a chapter between its stage and the last."""
    pairs = [(BELOW[stage_of(name)], stage_of(name))] if stage_of(name) in BELOW else PAIRS
    true = {str(changed_lines(*pair)) for pair in pairs}
    found = set(re.findall(r"(\d+)\s+changed\s+lines", text))
    return [f"{name}: {count} changed lines, not {sorted(true)}" for count in found - true]


# That of stage 05 shows a restart of torchrun, for which it has to be started.
@pytest.mark.parametrize(
    "stage", [pytest.param(x, marks=pytest.mark.slow) if x[:2] == "05" else x for x in STAGES]
)
def test_a_toy_prints_what_its_chapter_shows(stage, programs):
    """Lines of several processes come in any order, and one may come before another has ended."""
    if stage == STAGES[0] and not SAME_TEXT:
        pytest.skip("the losses are those of the text that comes with Python 3.11.7")
    section = TEXTS[f"{stage}/README.md"].split("\n## A toy\n")[1].split("\n## ")[0]
    command, shown = fences(section, "bash run")[0], fences(section, "text")[0]
    result = bash(command, ROOT, programs)
    assert result.returncode == 0, result.err
    lines = [line for line in shown.splitlines() if line]
    for line in set(lines):
        assert result.out.count(line) >= lines.count(line), result.out
    assert len(result.out.replace("\n", "")) == sum(map(len, lines)), result.out


# Names.


def missing_paths(name, text):
    """Files that are named, in backticks or in commands, and are not there."""
    words = " ".join(re.findall(r"`([^`\n]+)`", prose(text)) + shell_lines(text)).split()
    problems, top = [], {path.name for path in ROOT.iterdir()} | set(STAGES)
    for word in {word.strip("\"',;:()").lstrip("@").split("::")[0] for word in words}:
        first, _, rest = word.partition("/")
        ours = first in top and rest and not (first == "outputs" and rest[:8] != "measured")
        ours = ours or re.fullmatch(r"(?!my-)[\w.-]+\.(py|sh|sbatch|toml)", word)
        if not ours or "*" in word:
            continue
        known = [ROOT / word, ROOT / Path(name).parent / word]
        if "/" not in word:
            known += [*ROOT.glob(f"*/{word}"), *ROOT.glob(f"tests/*/{word}")]
        if not any(path.exists() for path in known):
            problems.append(f"{name}: there is no {word}")
    for path, test in re.findall(r"(tests/test_\w+\.py)::(\w+)", text):
        if (ROOT / path).exists() and f"def {test}(" not in (ROOT / path).read_text():
            problems.append(f"{name}: {path} has no {test}")
    return problems


def anchors(text):
    """The fragments that GitHub gives to the headings of a document."""
    found = []
    for heading in re.findall(r"^#+ +(.*?) *$", prose(text), re.MULTILINE):
        heading = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return found


def broken_links(name, text):
    """Relative links that lead nowhere: a file, and the anchor in it if it is a document."""
    problems = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        path = ROOT / Path(name).parent / path if path else ROOT / name
        if not path.exists():
            problems.append(f"{name}: {target} leads nowhere")
        elif path.suffix == ".md" and anchor:
            text_there = text if path == ROOT / name else path.read_text()
            if anchor not in anchors(text_there):
                problems.append(f"{name}: {target}: no heading has this anchor")
    return problems


@cache
def flags_of(stage):
    """The flags that the stage's --help shows."""
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(shown):
        patch.setattr(sys, "argv", [str(script(stage)), "--help"])
        with contextlib.suppress(SystemExit):
            load(stage).parse_args()
    return set(re.findall(r"--[a-z][a-z0-9-]*[a-z0-9]", shown.getvalue()))


def unknown_flags(name, text):
    """Flags that neither the stage has which a command or paragraph names, nor a launcher. A
    chapter speaks of its own stage; the README of all, unless it names one."""
    home = {stage_of(name)} if stage_of(name) else set(STAGES)
    parts = [(line, True) for line in shell_lines(text)]
    parts += [(paragraph, False) for paragraph in re.split(r"\n\s*\n", prose(text))]
    problems = []
    for part, is_command in parts:
        named = {r for r in STAGES if re.search(rf"\b{r[:2]}\b", part)}
        named |= {"05-multinode"} if re.search(r"run\.sh|\.sbatch", part) else set()
        stages = (named or home) if is_command else (named | home)
        known = set().union(*(flags_of(stage) for stage in stages)) | set(LAUNCHERS.split())
        for flag in sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", part)) - known):
            problems.append(f"{name}: {flag} is no flag of {sorted(stages)}")
    return problems


def unknown_measurements(name, text):
    """Names behind tests/benchmarks/benchmark.py and traps.py that are none of their commands."""
    problems, known = [], {"benchmark": set(benchmark.COMMANDS), "traps": {*traps.TRAPS, "all"}}
    known["traps"] |= {f"lines-{stage[:2]}" for stage in STAGES}
    named = re.findall(r"tests/benchmarks/(benchmark|traps)\.py ([a-z][\w-]*)", text)
    for module, command in named:
        if command not in known[module]:
            problems.append(f"{name}: tests/benchmarks/{module}.py has no command {command}")
    return problems


def test_each_picture_and_table_is_shown():
    """A measured table stands word for word in a document, or is linked there."""
    everything = "".join(text for name, text in TEXTS.items())
    for path in [*(ROOT / "outputs" / "figures").iterdir(), *measured("*.svg"), *measured("*.png")]:
        assert f"/{path.name})" in everything or f"({path.name})" in everything, path
    for path in measured("*.md"):
        command, table = path.read_text().split("\n\n", 1)
        assert command.startswith("`python ")
        assert table in everything or f"/{path.name})" in everything, path


def measured(pattern):
    files = (ROOT / "outputs" / "measured").glob(pattern)
    return [path for path in files if path.name != "README.md"]


CHECKS = [wrong_quotes, unexplained_hunks, wrong_counts, missing_paths, broken_links, unknown_flags]
CHECKS += [unknown_measurements, unmeasured]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_prose_is_true(name):
    problems = [problem for check in CHECKS for problem in check(name, TEXTS[name])]
    assert not problems, "\n".join(problems)


FAULTS = [
    (wrong_quotes, "```diff\n-import argparse\n```\n"),
    (wrong_quotes, "```diff\n+import torch.distributed as dist\n import gc\n```\n"),
    (wrong_quotes, "```python\nimport gc\nimport argparse\n```\n"),
    (unexplained_hunks, "## `def main(args):`\n\nWhy?\n\nBecause.\n"),
    (unmeasured, "The loss is 6.0233 instead of 123.4567."),
    (wrong_counts, "It has 51 changed\nlines."),
    (missing_paths, "See `tests/no_such.py`."),
    (missing_paths, "See `no_such.sh`."),
    (missing_paths, "```bash\npython 02-ddp/train.py -e a\n```\n"),
    (missing_paths, "See `tests/test_stages.py::test_no_such`."),
    (broken_links, "See [it](../03-fsdp/no-such.py)."),
    (broken_links, "# One\n\nSee [it](#two)."),
    (unknown_flags, "`--compression` sets it."),
    (unknown_flags, "```bash\npython 01-single-gpu/train-llm.py \\\n    --cpu-offload\n```\n"),
    (unknown_measurements, "`python tests/benchmarks/benchmark.py no-such`"),
]


def test_a_check_finds_its_fault():
    for check, text in FAULTS:
        of_notes = check in (unexplained_hunks, unmeasured)
        name = "02-ddp/notes.md" if of_notes else "02-ddp/README.md"
        assert check(name, text), text

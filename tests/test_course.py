"""What the README and the chapters say is so: their commands run, what they quote is there.

A check takes a document's name and its text, and returns what is wrong in it."""

import os
import re
import subprocess
import sys
import tempfile
import zlib
from itertools import groupby
from pathlib import Path
from pydoc_data.topics import all_topics

import commands
import pytest
from conftest import ROOT, STAGES, SUPPORT, environment, finish, fork, script
from stages import PAIRS
from test_stages import changed_lines, git_diff

pytestmark = pytest.mark.law6

# Whether the default data are those of Python 3.11.7, with which the documents' runs were made.
SAME_TEXT = zlib.crc32("".join(all_topics.values()).encode()) == 3328411364
BELOW = {stage: below for below, stage in PAIRS}
CHAPTERS = [f"{stage}/README.md" for stage in STAGES]
# The second file of a chapter: what is not on its main path.
DEEPER = [f"{stage}/deeper.md" for stage in STAGES if (ROOT / stage / "deeper.md").exists()]
# What read.py shows below single lines.
NOTES = [f"{stage}/notes.md" for stage in STAGES]
DOCUMENTS = ["README.md", "GUIDE.md", "CONTRIBUTING.md", "outputs/README.md", "GLOSSARY.md"]
DOCUMENTS += ["outputs/measured/README.md", *CHAPTERS, *DEEPER, *NOTES]
TEXTS = {name: (ROOT / name).read_text() for name in DOCUMENTS}
TOYS = {stage: ROOT / stage / "toy.py" for stage in STAGES}
TOYS["01-single-gpu"] = ROOT / "01-single-gpu" / "skeleton.py"

# Flags of other programs.
LAUNCHERS = "--standalone --nproc-per-node --nnodes --node-rank --master-addr --master-port"
LAUNCHERS += " --max-restarts --local-addr --rdzv-backend --rdzv-conf --rdzv-endpoint --rdzv-id"
LAUNCHERS += " --no-index --no-build-isolation --logdir --job-name --help --dist --base --partly"
LAUNCHERS += " --index-url --picture --additional-suffix --signals-to-handle --mem --time"
LAUNCHERS += " --collect-only --numa-binding --repo-type --local-dir"
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
    variables = environment(short=False, PYTHONPATH=str(SUPPORT / "small"))
    interpreter = Path(sys.executable).parent
    variables["PATH"] = os.pathsep.join(map(str, [programs, interpreter, variables["PATH"]]))
    how = {"cwd": folder, "env": variables, "stdin": subprocess.DEVNULL, "text": True}
    how |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    result = finish(subprocess.Popen(["bash", "-ec", block], **how))
    assert result.returncode == 0, f"{block}\n{result.out}\n{result.err}"
    return result.out


@pytest.fixture(scope="module")
def programs():
    with tempfile.TemporaryDirectory() as at, commands.programs(Path(at, "bin"), fork) as folder:
        yield folder


# Each block of these two stands alone. The blocks of a chapter are run in order, by one test.
BLOCKS = [(n, [x]) for n in ("README.md", "GUIDE.md") for x in fences(TEXTS[n], "bash run")]
BLOCKS += [(name, fences(TEXTS[name], "bash run")) for name in CHAPTERS + DEEPER]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "blocks"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_commands_run(name, blocks, tmp_path, programs):
    """Word for word, from the root of a copy of the repository."""
    folder = copy_of_the_repository(tmp_path / "course")
    for block in blocks:
        bash(block, folder, programs)


# That of stage 05 shows a restart of torchrun, for which it has to be started.
@pytest.mark.parametrize(
    "stage", [pytest.param(x, marks=pytest.mark.slow) if x[:2] == "05" else x for x in STAGES]
)
def test_a_toy_prints_what_its_chapter_shows(stage, programs):
    """Lines of several processes come in any order, and one may come before another has ended."""
    if stage == STAGES[0] and not SAME_TEXT:
        pytest.skip("the losses are those of the text that comes with Python 3.11.7")
    section = TEXTS[f"{stage}/README.md"].split("\n## A toy\n")[1].split("\n## ")[0]
    out = bash(fences(section, "bash run")[0], ROOT, programs)
    lines = [line for line in fences(section, "text")[0].splitlines() if line]
    for line in set(lines):
        assert out.count(line) >= lines.count(line), out
    assert len(out.replace("\n", "")) == sum(map(len, lines)), out


# Code.


def is_in(block, lines):
    """Whether the quoted lines are in `lines`, in this order. A line `...` stands for those left
    out, and between two of them nothing is."""
    start = 0
    quoted = [line.rstrip() for line in block.splitlines()]
    for left_out, part in groupby(quoted, lambda line: line.strip() == "..."):
        if not left_out:
            part = list(part)
            tries = range(start, len(lines) - len(part) + 1)
            start = next((i + len(part) for i in tries if lines[i : i + len(part)] == part), None)
            if start is None:
                return False
    return True


def wrong_quotes(name, text):
    """Lines in ```diff and ```python blocks that are not those of the chapter's stage."""
    stage = stage_of(name)
    pair = (BELOW[stage], stage) if stage in BELOW else PAIRS[0]
    diff = [line.rstrip() for line in git_diff(*pair, "-U100000").splitlines()]
    sources = [script(stage), TOYS[stage]] if stage else [script(STAGES[0])]
    sources += [ROOT / "logs_and_checkpoints.py"]
    sources = [path.read_text().splitlines() for path in sources]
    problems = [f"not in the diff:\n{x}" for x in fences(text, "diff") if not is_in(x, diff)]
    for block in fences(text, "python"):
        is_quote = stage or block.startswith(" ")  # or else a program of its own
        if is_quote and not any(is_in(block, lines) for lines in sources):
            problems.append(f"not in the scripts:\n{block}")
    return problems


def wrong_counts(name, text):
    """`NN changed lines` that are not so, in a chapter between its stage and the last."""
    pairs = [(BELOW[stage_of(name)], stage_of(name))] if stage_of(name) in BELOW else PAIRS
    true = {str(changed_lines(*pair)) for pair in pairs}
    found = set(re.findall(r"(\d+)\s+changed\s+lines", text))
    return [f"{count} changed lines, not {sorted(true)}" for count in found - true]


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
            problems.append(f"there is no {word}")
    for path, test in re.findall(r"(tests/test_\w+\.py)::(\w+)", text):
        if f"def {test}(" not in (ROOT / path).read_text():
            problems.append(f"{path} has no {test}")
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
    for target in re.findall(r"\]\((?![a-z]+:)([^)\s]+)\)", prose(text)):
        path, _, anchor = target.partition("#")
        path = ROOT / Path(name).parent / path if path else ROOT / name
        if not path.exists():
            problems.append(f"{target} leads nowhere")
        elif path.suffix == ".md" and anchor and anchor not in anchors(path.read_text()):
            problems.append(f"{target}: no heading has this anchor")
    return problems


def flags_of(stage):
    return set(re.findall(r'"(--[a-z][a-z-]+)"', script(stage).read_text())) | {"--no-compile"}


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
            problems.append(f"{flag} is no flag of {sorted(stages)}")
    return problems


def unknown_measurements(name, text):
    """Names behind tests/benchmarks/benchmark.py and traps.py that are none of their commands."""
    known = (ROOT / "tests" / "benchmarks" / "benchmark.py").read_text()
    known += "".join(f'"{stage[:2]}"' for stage in STAGES)
    text = re.sub(r"git checkout \w+`?(,| &&)[^|]*?\.py [\w -]+", "", text)  # of the history
    named = re.findall(r"benchmarks/(?:benchmark|traps)\.py (\w[\w-]*)", text)
    return [f"{command} is no command" for command in named if f'"{command}"' not in known]


CHECKS = [wrong_quotes, wrong_counts, missing_paths, broken_links, unknown_flags]
CHECKS += [unknown_measurements]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_a_document_names_and_quotes_is_there(name):
    problems = [problem for check in CHECKS for problem in check(name, TEXTS[name])]
    assert not problems, "\n".join([name, *problems])


def test_each_picture_and_table_is_shown():
    """A measured table stands word for word in a document, or is linked there."""
    everything = "".join(TEXTS.values())
    measured = [path for path in (ROOT / "outputs" / "measured").iterdir() if path.is_file()]
    for path in [*(ROOT / "outputs" / "figures").iterdir(), *measured]:
        is_linked = f"/{path.name})" in everything or f"({path.name})" in everything
        if path.suffix == ".md" and path.name != "README.md":
            command, table = path.read_text().split("\n\n", 1)
            assert command.startswith("`python ")
            is_linked = is_linked or table in everything
        assert is_linked or path.suffix not in (".svg", ".png", ".html", ".md"), path

"""propagate.py carries an edit of one rung into all others, and loses nothing where it cannot."""

import ast
import random
import shutil
import subprocess
import sys
from collections import Counter
from difflib import SequenceMatcher

import propagate
import pytest
from ladder import PARENTS, ROOT, RUNGS, builds_on, script

pytestmark = pytest.mark.law2

MARK = "  # edited\n"


class Ladder:
    """A git repository with copies of the scripts, all committed."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "tests" / "support").mkdir(parents=True)
        for name in ("propagate.py", "ladder.py"):
            shutil.copy(ROOT / "tests" / "support" / name, folder / "tests" / "support")
        for rung in RUNGS:
            (folder / rung).mkdir()
            shutil.copy(ROOT / rung / "train-llm.py", folder / rung)
        self.git("init", "--quiet")
        self.commit()
        self.committed = self.all()

    def git(self, *words):
        names = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.autocrlf=false")
        subprocess.run(["git", *names, *words], cwd=self.folder, check=True, capture_output=True)

    def commit(self):
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "a")

    def path(self, rung):
        return self.folder / rung / "train-llm.py"

    def lines(self, rung):
        return self.path(rung).read_text().splitlines(keepends=True)

    def all(self):
        return {rung: self.path(rung).read_text() for rung in RUNGS}

    def edit(self, rung, i, new):
        """Replaces line i, counted from 0, by other lines."""
        lines = self.lines(rung)
        lines[i : i + 1] = new
        self.path(rung).write_text("".join(lines))

    def replace(self, rung, line, *new):
        self.edit(rung, self.lines(rung).index(line), new)

    def propagate(self, *flags):
        """The exit code, and what was said of each rung."""
        command = [sys.executable, "tests/support/propagate.py", *flags]
        self.result = subprocess.run(command, cwd=self.folder, capture_output=True, text=True)
        said = [line.partition(": ") for line in self.result.stdout.splitlines()]
        said = {rung: what for rung, _, what in said if rung in RUNGS}
        return self.result.returncode, said


@pytest.fixture
def ladder(tmp_path):
    return Ladder(tmp_path)


def shared_line(ladder):
    """The last line of a function that is the same in all rungs. No other line is like it."""
    sources = []
    for rung in RUNGS:
        text = ladder.path(rung).read_text()
        nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
        sources.append({ast.get_source_segment(text, node) for node in nodes})
    for source in sorted(set.intersection(*sources)):
        line = source.splitlines()[-1] + "\n"
        if line.startswith("    return ") and all(ladder.lines(r).count(line) == 1 for r in RUNGS):
            return line
    raise AssertionError("no function is the same in all rungs")


def own_line(ladder, rung):
    """The index of a line between lines that the rung adds to its parent."""
    matcher = SequenceMatcher(None, ladder.lines(PARENTS[rung]), ladder.lines(rung), autojunk=False)
    for tag, _, _, first, last in matcher.get_opcodes():
        if tag == "insert" and last - first >= 5:
            return first + 2
    raise AssertionError(f"{rung} adds nowhere five lines")


def marked(line):
    return line.rstrip("\n") + MARK


@pytest.mark.parametrize("rung", [RUNGS[0], RUNGS[-1]])
def test_an_edit_of_a_shared_function_arrives_in_all_rungs(ladder, rung):
    line = shared_line(ladder)
    new = ["    # A comment.\n", marked(line)]
    ladder.replace(rung, line, *new)
    code, said = ladder.propagate(rung)
    assert code == 0
    assert said == {other: "applied" for other in RUNGS if other != rung}
    for other, before in ladder.committed.items():
        assert ladder.path(other).read_text() == before.replace(line, "".join(new))

    # A second time there is nothing to do.
    expected = ladder.all()
    code, said = ladder.propagate(rung)
    assert code == 0 and set(said.values()) == {"unchanged"}
    assert ladder.all() == expected


def test_a_line_of_one_rung_alone_changes_no_other(ladder):
    rung = RUNGS[-1]
    i = own_line(ladder, rung)
    ladder.edit(rung, i, [marked(ladder.lines(rung)[i]), "an inserted line\n"])
    expected = ladder.all()
    code, said = ladder.propagate(rung)
    assert code == 0 and set(said.values()) == {"unchanged"}
    assert ladder.all() == expected


def test_an_idea_arrives_in_the_rungs_that_are_built_on_it(ladder):
    i = own_line(ladder, "02-ddp")
    ladder.edit("02-ddp", i, [marked(ladder.lines("02-ddp")[i])])
    _, said = ladder.propagate("02-ddp")
    assert said[RUNGS[0]] == "unchanged"
    assert said["03-fsdp"] == "applied"


def test_a_conflict_is_reported_and_carried_on_by_hand(ladder):
    """Rung 03 and all that are built on it have another line where rung 01 is edited."""
    line = shared_line(ladder)
    other = line.rstrip("\n") + "  # another way\n"
    upper = [rung for rung in RUNGS if builds_on(rung, "03-fsdp")]
    for rung in upper:
        ladder.replace(rung, line, other)
    ladder.commit()
    # The script also has an edit that fits, far above the one that does not.
    first_import = "import math\n"
    ladder.replace(RUNGS[0], first_import, marked(first_import), "import this\n")
    ladder.replace(RUNGS[0], line, marked(line))
    expected = {rung: ladder.path(rung).read_text() for rung in upper}

    code, said = ladder.propagate(RUNGS[0])
    number = 1 + ladder.lines("03-fsdp").index(other)
    assert code == 1
    assert said.pop("02-ddp") == "applied"
    assert said.pop("03-fsdp") == f"conflict at line {number}"
    assert set(said.values()) == {"not reached"}
    assert ladder.result.stdout.partition("\n\n")[2] == (
        f"03-fsdp/train-llm.py:{number}\n{'<' * 20} 03-fsdp\n{other}"
        f"{'|' * 20} 02-ddp before the edit\n{line}"
        f"{'=' * 20}\n{marked(line)}{'>' * 20} 02-ddp after the edit\n"
    )
    assert {rung: ladder.path(rung).read_text() for rung in upper} == expected

    # The edit is made by hand in rung 03, and goes on from there. Rung 02 keeps what it has.
    ladder.replace("03-fsdp", first_import, marked(first_import), "import this\n")
    ladder.replace("03-fsdp", other, marked(other))
    code, said = ladder.propagate("03-fsdp")
    assert code == 1
    assert said["02-ddp"].startswith("conflict at line ")
    for rung in RUNGS:
        assert marked(other if rung in upper else line) in ladder.lines(rung)
        assert "import this\n" in ladder.lines(rung)


def test_a_rung_with_changes_of_its_own_keeps_them_to_itself(ladder):
    """They are not committed, are kept, and are not carried along."""
    line = shared_line(ladder)
    ladder.edit("02-ddp", len(ladder.lines("02-ddp")) - 1, ["the last line is another one\n"])
    ladder.replace(RUNGS[0], line, marked(line))
    own = ladder.path("02-ddp").read_text()
    code, said = ladder.propagate(RUNGS[0])
    assert code == 0 and set(said.values()) == {"applied"}
    for rung, before in ladder.committed.items():
        before = own if rung == "02-ddp" else before
        assert ladder.path(rung).read_text() == before.replace(line, marked(line))


def test_an_edit_since_another_commit(ladder):
    line = shared_line(ladder)
    ladder.replace(RUNGS[0], line, marked(line))
    ladder.commit()
    code, _ = ladder.propagate(RUNGS[0])
    assert code == 2
    assert ladder.result.stderr == (
        "propagate.py: error: 01-single-gpu/train-llm.py is the same in HEAD and in the work tree\n"
    )
    code, said = ladder.propagate(RUNGS[0], "--base", "HEAD~1")
    assert code == 0 and set(said.values()) == {"applied"}


def test_errors_are_one_line(ladder):
    for flags, message in [
        ((RUNGS[0], "--base", "no-such"), "git show: fatal: invalid object name 'no-such'."),
        (("09-no-such",), "argument rung: invalid choice: '09-no-such'"),
    ]:
        code, _ = ladder.propagate(*flags)
        assert code == 2
        [line] = ladder.result.stderr.splitlines()
        assert line.startswith(f"propagate.py: error: {message}")
    assert ladder.all() == ladder.committed


# A single merge.


def merged(there, before, after):
    """`there` with the edit, and the lines at which it does not fit; a letter stands for a line."""
    texts = ["".join(f"{letter}\n" for letter in text) for text in (there, before, after)]
    text, conflicts = propagate.merge(*texts)
    text = propagate.BLOCK.sub(r"\1", text)
    return text.replace("\n", ""), [line for line, _ in conflicts]


@pytest.mark.parametrize(
    ("before", "after", "there", "result"),
    [
        # A line is replaced, removed, inserted.
        ("abcde", "abXde", "abcde", "abXde"),
        ("abcde", "abde", "abcde", "abde"),
        ("abcde", "abcXde", "abcde", "abcXde"),
        ("abc", "Xabc", "abc", "Xabc"),
        ("abc", "abcX", "abc", "abcX"),
        # It is next to a line that the other adds.
        ("abcde", "abXde", "ab1cde", "ab1Xde"),
        ("abcde", "abXde", "abc1de", "abX1de"),
        ("abcde", "abXde", "ab1c2de", "ab1X2de"),
        ("abcde", "abde", "ab1cde", "ab1de"),
        # It is next to a line that the other lacks.
        ("ab1cde", "ab1Xde", "abcde", "abXde"),
        ("abc1de", "abX1de", "abcde", "abXde"),
        ("ab1c2de", "ab1X2de", "abcde", "abXde"),
        ("ab1cde", "ab1de", "abcde", "abde"),
        ("ab1cde", "ab1Xde", "abc2de", "abX2de"),
        # The other does not have it.
        ("ab123cd", "ab1X3cd", "abcd", "abcd"),
        ("ab123cd", "ab12X3cd", "abcd", "abcd"),
        ("ab123cd", "ab123Xcd", "abcd", "abcd"),
        ("ab123cd", "abcd", "abcd", "abcd"),
        # The other has the edit already.
        ("abcde", "abXde", "abXde", "abXde"),
        ("abcde", "abXde", "ab1Xde", "ab1Xde"),
        ("abcde", "abcXde", "abcXde", "abcXde"),
        ("abcde", "abcXde", "abcX1de", "abcX1de"),
        ("abcde", "abde", "abde", "abde"),
        # Several at once.
        ("abcdefg", "XbcdfgY", "abc1defg", "Xbc1dfgY"),
    ],
)
def test_what_fits_is_merged(before, after, there, result):
    assert merged(there, before, after) == (result, [])


@pytest.mark.parametrize(
    ("before", "after", "there", "line"),
    [
        # The other has something else in this place.
        ("abcde", "abXde", "ab1de", 3),
        ("ab1cde", "ab1Xde", "ab2cde", 3),
        ("abc1de", "abX1de", "abc2de", 3),
        ("abcde", "abde", "ab1de", 3),
        # Lines of the other are between those that are replaced, or at an insertion.
        ("abcde", "aXYZe", "ab1cde", 2),
        ("abcde", "abcXde", "abc1de", 4),
        # The other has both the old and the new line.
        ("abcde", "abXde", "abcXde", 3),
        # The other adds the old line once more, so that either could be meant.
        ("abcde", "abXde", "abccde", 3),
    ],
)
def test_what_does_not_fit_is_a_conflict(before, after, there, line):
    assert merged(there, before, after) == (there, [line])


@pytest.mark.parametrize("above", ["Xb", "XYZb", "b", ""])
def test_a_conflict_is_counted_in_the_lines_of_the_other_rung(above):
    """Part of the edit fits. It replaces two lines above by more or fewer."""
    there, before, after = "aBbcdefg1ijk2", "aBbcdefghijkl", f"a{above}cdefgHijkL"
    assert merged(there, before, after) == (f"a{above}cdefg1ijk2", [9, 13])


@pytest.mark.parametrize(("rung", "parent"), PARENTS.items())
def test_a_merge_changes_nothing_but_the_lines_of_the_edit(rung, parent):
    """Whichever lines are edited: what one rung has and the other has not stays."""
    for one, two in ((rung, parent), (parent, rung)):
        before, there = (script(name).read_text().splitlines(keepends=True) for name in (one, two))
        draw = random.Random(0)
        for _ in range(20):
            after, removed, added = list(before), Counter(), Counter()
            for i in sorted(draw.sample(range(len(before)), 5), reverse=True):
                after[i : i + 1] = draw.choice([[], [f"{i}\n"], [before[i], f"{i}\n"]])
                removed[before[i]] += 1
                added[f"{i}\n"] += 1
            text, _ = propagate.merge(*("".join(lines) for lines in (there, before, after)))
            result = propagate.BLOCK.sub(r"\1", text).splitlines(keepends=True)
            assert not Counter(there) - Counter(result) - removed
            assert not Counter(result) - Counter(there) - added

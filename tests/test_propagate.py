"""propagate.py carries an edit of one rung into all others, and loses nothing where it cannot."""

import ast
import random
import shutil
import subprocess
import sys
from collections import Counter

import propagate
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ladder import PARENTS, ROOT, RUNGS

LAST = "05-multinode"
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
    pair = [ladder.lines(name) for name in (PARENTS[rung], rung)]
    for tag, _, _, first, last in propagate.opcodes(*pair):
        if tag == "insert" and last - first >= 5:
            return first + 2
    raise AssertionError(f"{rung} adds nowhere five lines")


def marked(line):
    return line.rstrip("\n") + MARK


@pytest.mark.parametrize("rung", [RUNGS[0], LAST])
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
    code, said = ladder.propagate(rung)
    assert code == 0 and set(said.values()) == {"unchanged"}


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
    line = ladder.lines("02-ddp")[i]
    ladder.edit("02-ddp", i, [marked(line)])
    _, said = ladder.propagate("02-ddp")
    assert said[RUNGS[0]] == "unchanged"
    assert said["03-fsdp"] == "applied"


def test_a_conflict_is_reported_and_nothing_is_lost(ladder):
    """The first line of each script names its rung, so an edit of it fits in no other."""
    line = shared_line(ladder)
    ladder.edit("03-fsdp", 0, ['"""Something else.\n'])
    ladder.replace("03-fsdp", line, marked(line))
    expected = ladder.all()
    code, said = ladder.propagate("03-fsdp")
    assert code == 1
    for rung in neighbors("03-fsdp"):
        assert said[rung] == "conflict at line 1, left untouched"
        assert f"{rung}/train-llm.py:1: " in ladder.result.stdout
    assert said[RUNGS[0]] == "not reached, it lies beyond 02-ddp"
    assert said[LAST] == "not reached, it lies beyond 04-compression"
    assert '-"""Rung 03' in ladder.result.stdout and '+"""Something else.' in ladder.result.stdout
    assert ladder.all() == expected

    # With --partly all but this line arrives, everywhere.
    code, said = ladder.propagate("03-fsdp", "--partly")
    assert code == 1
    assert said["02-ddp"] == "conflict at line 1, applied in part"
    assert said[RUNGS[0]] == said[LAST] == "applied"
    for rung in RUNGS:
        if rung != "03-fsdp":
            new = ladder.committed[rung].replace(line, marked(line))
            assert ladder.path(rung).read_text() == new


def neighbors(rung):
    children = [child for child, parent in PARENTS.items() if parent == rung]
    return [*children, PARENTS[rung]] if rung in PARENTS else children


def test_a_conflict_is_resolved_by_hand_and_carried_on(ladder):
    """The missing change is made in the rung in conflict, which is named in a second call."""
    line = shared_line(ladder)
    other = line.rstrip("\n") + "  # another way\n"
    upper = [rung for rung in RUNGS if rung not in (RUNGS[0], "02-ddp")]
    for rung in upper:
        ladder.replace(rung, line, other)
    ladder.commit()
    ladder.replace(RUNGS[0], line, marked(line))
    code, said = ladder.propagate(RUNGS[0])
    number = 1 + ladder.lines("03-fsdp").index(other)
    assert code == 1
    assert said.pop("02-ddp") == "applied"
    assert said.pop("03-fsdp") == f"conflict at line {number}, left untouched"
    assert set(said.values()) == {"not reached, it lies beyond 03-fsdp"}

    ladder.replace("03-fsdp", other, marked(other))
    code, said = ladder.propagate("03-fsdp")
    assert code == 1
    assert said["02-ddp"].startswith("conflict at line ")
    for rung in RUNGS:
        assert marked(other if rung in upper else line) in ladder.lines(rung)


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


def test_a_rung_that_has_the_edit_already_passes_it_on(ladder):
    line = shared_line(ladder)
    for rung in (RUNGS[0], "02-ddp"):
        ladder.replace(rung, line, marked(line))
    code, said = ladder.propagate(RUNGS[0])
    assert code == 0
    assert said.pop("02-ddp") == "unchanged"
    assert set(said.values()) == {"applied"}


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
    code, _ = ladder.propagate("01-single-gpu", "--base", "no-such")
    assert code == 2
    [line] = ladder.result.stderr.splitlines()
    assert line.startswith(
        "propagate.py: error: git has no 01-single-gpu/train-llm.py in no-such: "
    )
    code, _ = ladder.propagate("09-no-such")
    assert code == 2
    [line] = ladder.result.stderr.splitlines()
    assert "invalid choice: '09-no-such'" in line
    assert ladder.all() == ladder.committed


# A single merge.


def merged(old, new, other):
    """`other` with the edit, and the lines at which it does not fit; a letter stands for a line."""
    result = propagate.merge(list(old), list(new), list(other))
    return "".join(result.after), [conflict.line for conflict in result.conflicts]


@pytest.mark.parametrize(
    ("old", "new", "other", "after"),
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
        ("abcde", "abde", "ab1c2de", "ab12de"),
        # The other does not have it.
        ("ab123cd", "ab1X3cd", "abcd", "abcd"),
        ("ab123cd", "ab12X3cd", "abcd", "abcd"),
        ("ab123cd", "abcd", "abcd", "abcd"),
        # The other has the edit already.
        ("abcde", "abXde", "abXde", "abXde"),
        ("abcde", "abXde", "ab1Xde", "ab1Xde"),
        ("abcde", "abcXde", "abcXde", "abcXde"),
        ("abcde", "abde", "abde", "abde"),
        # Several at once.
        ("abcdefg", "XbcdfgY", "abc1defg", "Xbc1dfgY"),
    ],
)
def test_what_fits_is_merged(old, new, other, after):
    assert merged(old, new, other) == (after, [])


@pytest.mark.parametrize(
    ("old", "new", "other", "line"),
    [
        # The other has something else in this place.
        ("abcde", "abXde", "ab1de", 3),
        # Lines of the other are between those that are replaced, or around an insertion.
        ("abcde", "aXYZe", "ab1cde", 2),
        ("abcde", "abcXde", "abc1de", 4),
        # It may belong to the lines that the other lacks, or not.
        ("ab12cd", "abX12cd", "abcd", 3),
        # The other has both the old and the new line.
        ("abcde", "abXde", "abcXde", 3),
        # The same lines stand in another order.
        ("cb", "dc", "bd", 1),
    ],
)
def test_what_does_not_fit_is_a_conflict(old, new, other, line):
    assert merged(old, new, other) == (other, [line])


TEXT = st.text("abc", max_size=12)


@given(TEXT, TEXT, TEXT)
def test_a_merge_keeps_what_it_need_not_change(old, new, other):
    """Whatever the three texts are: a script that is like the old one becomes the new one, one that
    is like the new one stays, and `before` and `after` differ by hunks of the edit alone."""
    assert merged(old, new, old) == (new, [])
    assert merged(old, new, new) == (new, [])
    result = propagate.merge(list(old), list(new), list(other))
    hunks = [hunk for hunk in propagate.opcodes(list(old), list(new)) if hunk[0] != "equal"]
    removed = sum(i2 - i1 for _, i1, i2, _, _ in hunks)
    added = sum(j2 - j1 for _, _, _, j1, j2 in hunks)
    assert len(other) - removed <= len(result.after) <= len(other) + added


@pytest.mark.parametrize(("rung", "parent"), PARENTS.items())
def test_a_merge_changes_nothing_but_the_lines_of_the_edit(rung, parent):
    """Whichever lines are edited: what one rung has and the other has not stays."""
    for one, two in ((rung, parent), (parent, rung)):
        old, other = (
            (ROOT / name / "train-llm.py").read_text().splitlines() for name in (one, two)
        )
        draw = random.Random(0)
        for _ in range(20):
            new, removed, added = list(old), Counter(), Counter()
            for i in sorted(draw.sample(range(len(old)), 5), reverse=True):
                removed[old[i]] += 1
                new[i : i + 1] = draw.choice([[], [f"{i}"], [old[i], f"{i}"]])
                added[f"{i}"] += 1
            result = propagate.merge(old, new, other)
            assert result.before == other
            assert not Counter(other) - Counter(result.after) - removed
            assert not Counter(result.after) - Counter(other) - added

"""Carries an edit of one rung's script into the scripts of all other rungs.

Usage::

    python tests/support/propagate.py 03-fsdp                  # the edit since the last commit
    python tests/support/propagate.py 03-fsdp --base main~2    # the edit since another commit

Each rung holds a complete script, so code that all rungs share stands in all of them. Edit it in
the script of one rung, then run this command. The edit is the difference between the committed
script and the script in the work tree. It goes from rung to rung along the ladder, from parent to
child and from child to parent. Each step is a three-way merge by ``git merge-file``. Uncommitted
changes of the other rungs are kept, and are not carried along.

For each rung the command prints one of:

* ``applied``: the script was changed.
* ``unchanged``: the script has the edit already, or has nothing in the place of the edited lines.
  They belong to the idea of the edited rung, then. The same is assumed of a line that was inserted
  next to such lines. An unchanged rung passes nothing on.
* ``conflict at line N``: the script has other lines in the place of the edited ones. It is left
  untouched, and the lines are printed. Make the edit by hand in this rung, then run the command
  from there, so that the edit reaches the rungs beyond.
* ``not reached``: the rung lies beyond one with a conflict.

``git merge-file`` also reports a conflict where an edited line merely touches a line that one of
the two rungs lacks. The command resolves it if the place of the edit is certain. It remains a
conflict if a line is inserted exactly where the other rung adds one, if the other rung lacks a
removed line already, or if an edited line occurs once more close by, such as an empty line.

The exit code is 0 without a conflict, 1 with one, and 2 after an error, which changes no file.
"""

import argparse
import re
import subprocess
import sys
from difflib import Match, SequenceMatcher
from os.path import commonprefix
from pathlib import Path
from tempfile import TemporaryDirectory

from ladder import PARENTS, ROOT, RUNGS, script

# A conflict: the lines of the neighbor, those before the edit, those after it. The markers are
# longer than usual, so that no line of a script looks like one.
BLOCK = re.compile(
    r"^<{20} .*?\n(.*?)^\|{20} .*?\n(.*?)^={20}\n(.*?)^>{20} .*?\n", re.MULTILINE | re.DOTALL
)


def fail(message):
    print(f"propagate.py: error: {message}", file=sys.stderr)
    sys.exit(2)


def git(*words, good_codes):
    result = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, encoding="utf-8")
    if result.returncode not in good_codes:
        fail(f"git {words[0]}: {result.stderr.strip()}")
    return result.stdout


def resolve(block):
    """The text that replaces a conflict; the conflict itself if somebody has to decide."""
    ours, base, theirs = (text.splitlines(keepends=True) for text in block.groups())
    if ours in ([], theirs):
        return block[1]
    # The edit replaces `old` by `new`, and keeps the lines of the block above and below them.
    above = commonprefix([base, theirs])
    old, new = base[len(above) :], theirs[len(above) :]
    below = commonprefix([old[::-1], new[::-1]])[::-1]
    old, new = old[: len(old) - len(below)], new[: len(new) - len(below)]
    # It fits if the neighbor has the old lines, or the new ones already. On either side of them the
    # neighbor may lack lines or add some, but not both, which would be other lines.
    for lines in filter(None, (old, new)):
        for i in range(len(ours) - len(lines) + 1):
            start, end = ours[:i], ours[i + len(lines) :]
            if (
                ours[i : i + len(lines)] == lines
                and not (above and start)
                and not (below and end)
                and {*above, *below, *start, *end}.isdisjoint(old + new)
            ):
                return "".join(start + new + end)
    return block[0]


def merge(there, before, after, neighbor="neighbor", source="source"):
    """Carries the edit from `before` to `after` into the text `there`. Returns the new text, and
    the conflicts as (line of `there`, block)."""
    with TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("there", "before", "after")]
        for path, text in zip(paths, (there, before, after), strict=True):
            path.write_text(text, encoding="utf-8")
        flags = ["-p", "--diff3", "--marker-size=20"]
        for label in (neighbor, f"{source} before the edit", f"{source} after the edit"):
            flags += ["-L", label]
        # The exit code is the number of conflicts, at most 127.
        merged = BLOCK.sub(resolve, git("merge-file", *flags, *paths, good_codes=range(128)))

    # Lines of `merged` are counted as those of `there`, which the edit may have moved.
    matcher = SequenceMatcher(None, merged.splitlines(), there.splitlines(), autojunk=False)
    matches = [Match(0, 0, 0), *matcher.get_matching_blocks()]
    conflicts = []
    for block in BLOCK.finditer(merged):
        index = merged.count("\n", 0, block.start(1))
        match = max(match for match in matches if match.a <= index)
        conflicts.append((match.b + index - match.a + 1, block[0]))
    return merged, conflicts


def neighbors(rung):
    """The parent and the children of a rung."""
    return [other for other in RUNGS if PARENTS.get(rung) == other or PARENTS.get(other) == rung]


def carry(source, before, after, came_from=None):
    """Yields (rung, its text, its text with the edit, conflicts) for all rungs that are reached
    from `source`, whose text was `before` and is `after`."""
    for rung in neighbors(source):
        if rung != came_from:
            there = script(rung).read_text(encoding="utf-8")
            merged, conflicts = merge(there, before, after, rung, source)
            yield rung, there, merged, conflicts
            if not conflicts:
                yield from carry(rung, there, merged, source)


def main():
    parser = argparse.ArgumentParser(
        description="Carries an edit of one rung's train-llm.py into those of all other rungs."
    )
    parser.error = fail  # one line, without the usage
    parser.add_argument("rung", choices=RUNGS, help="the rung that was edited")
    parser.add_argument("--base", default="HEAD", help="the commit before the edit (HEAD)")
    args = parser.parse_args()

    name = f"{args.rung}/train-llm.py"
    before = git("show", f"{args.base}:./{name}", good_codes=[0])
    after = script(args.rung).read_text(encoding="utf-8")
    if before == after:
        fail(f"{name} is the same in {args.base} and in the work tree")

    said = {rung: "not reached" for rung in RUNGS if rung != args.rung}
    blocks = []
    for rung, there, merged, conflicts in list(carry(args.rung, before, after)):
        if conflicts:
            said[rung] = f"conflict at line {conflicts[0][0]}"
            blocks += [f"\n{rung}/train-llm.py:{line}\n{block}" for line, block in conflicts]
        elif merged == there:
            said[rung] = "unchanged"
        else:
            said[rung] = "applied"
            script(rung).write_text(merged, encoding="utf-8")
    for rung, what in said.items():
        print(f"{rung}: {what}")
    print("".join(blocks), end="")
    return 1 if blocks else 0


if __name__ == "__main__":
    sys.exit(main())

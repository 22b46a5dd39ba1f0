"""Carries an edit of one rung's script into the scripts of all the other rungs.

    python tests/support/propagate.py 03-fsdp                  the edit since the last commit
    python tests/support/propagate.py 03-fsdp --base main~2    the edit since another commit
    python tests/support/propagate.py 03-fsdp --partly         see below

Each rung holds a complete script, so a part that all rungs share stands in all of them. Edit it in
one rung's train-llm.py, then run this command. The edit is the difference between the committed
script and the script in the work tree. It goes from rung to rung along the ladder, from parent to
child and from child to parent, because neighbors differ least.

The edit consists of hunks: groups of consecutive lines that were replaced, removed or inserted. A
neighbor takes over a hunk if it has the lines that the hunk replaces or, for an insertion, the two
lines on either side of it, next to each other. A neighbor that has nothing in the place of these
lines is left as it is, and so are the rungs beyond it: the hunk belongs to the idea of the edited
rung. Anything else is a conflict, which somebody has to decide: the neighbor has other lines in
this place, or it cannot be told where an inserted line belongs.

For each rung the command prints one of:

    applied               the script was changed
    unchanged             it has the edit already, or does not have the edited lines
    conflict at line N    some hunk does not fit at line N of this rung's script
    not reached           the rung lies beyond one with a conflict

A rung with a conflict is left untouched, so that no script holds half of an edit. The hunks in
conflict are printed below the list. With --partly the rung, and those beyond it, take over the
other hunks. After you made the missing changes in that rung by hand, run the command with its name,
so that the rungs beyond it get them. Rungs that have the edit already stay as they are. A hunk that
you wrote differently in that rung is then reported as a conflict with the rung that it came from.

Other rungs may have uncommitted changes too. They are merged as they stand in the work tree, and
their own changes are kept and not carried along. The exit code is 0 if all hunks were taken over, 1
if there is a conflict, and 2 if there was an error; then no file was written.

Why not `git merge-file`: it also reports a conflict where an edited line merely touches a line that
the other rung adds, and where the edited lines exist in one rung only.
"""

import argparse
import subprocess
import sys
from dataclasses import dataclass
from difflib import SequenceMatcher

from ladder import PARENTS, ROOT, RUNGS, script


@dataclass
class Conflict:
    """A hunk that does not fit into another script; `line` and `there` say what is in its place."""

    line: int
    removed: list
    added: list
    there: list


@dataclass
class Merge:
    """`before` and `after` are the other script without and with the hunks that fit into it."""

    before: list
    after: list
    conflicts: list


def fail(message):
    print(f"propagate.py: error: {message}", file=sys.stderr)
    sys.exit(2)


def opcodes(one, other):
    return SequenceMatcher(None, one, other, autojunk=False).get_opcodes()


def matches(one, other):
    """For each line of `one` the index of the same line in `other`, None if it is not there. The
    positions before the first line and behind the last one count as lines that match."""
    found = {-1: -1, len(one): len(other)}
    for tag, i1, i2, j1, _ in opcodes(one, other):
        for i in range(i1, i2):
            found[i] = j1 + i - i1 if tag == "equal" else None
    return found


def consecutive(indices):
    """Whether all lines were found, one behind the other."""
    return None not in indices and all(
        one + 1 == other for one, other in zip(indices, indices[1:], strict=False)
    )


def merge(old, new, other):
    """Carries the edit from `old` to `new`, lists of lines, into `other`."""
    old_in_other = matches(old, other)
    new_in_other = matches(new, other)
    shared = set(old_in_other.values())
    before, after, conflicts, end = [], [], [], 0
    for tag, i1, i2, j1, j2 in opcodes(old, new):
        if tag == "equal":
            continue
        removed, added = old[i1:i2], new[j1:j2]
        removed_there = [old_in_other[i] for i in range(i1, i2)]
        added_there = [new_in_other[j] for j in range(j1, j2)]
        around = [old_in_other[i1 - 1], old_in_other[i2]]
        has_some_removed = any(index is not None for index in removed_there)
        # Lines that `other` has without having them from `old`.
        has_added = bool(added) and consecutive(added_there) and shared.isdisjoint(added_there)

        # What stands in the place of the hunk: the lines between the nearest ones that both have.
        above = max(old_in_other[i] for i in range(-1, i1) if old_in_other[i] is not None)
        below = min(old_in_other[i] for i in range(i2, len(old) + 1) if old_in_other[i] is not None)
        there = other[above + 1 : below]

        # The lines of `other` that the hunk replaces, from the first one up to the second.
        place = None
        if has_added and not has_some_removed:
            place = added_there[0], added_there[-1] + 1  # it has the hunk already
        elif removed and consecutive(removed_there) and not has_added:
            place = removed_there[0], removed_there[-1] + 1
        elif not removed and consecutive(around):
            place = around[1], around[1]

        lacks_lines = not there and not has_some_removed and (removed or around == [None, None])
        if place and place[0] >= end:
            before += other[end : place[0]] + removed
            after += other[end : place[0]] + added
            end = place[1]
        elif place or not lacks_lines:
            conflicts.append(Conflict(above + 2, removed, added, there))
    return Merge(before + other[end:], after + other[end:], conflicts)


def neighbors(rung):
    """The parent and the children of a rung."""
    return [other for other in RUNGS if PARENTS.get(rung) == other or PARENTS.get(other) == rung]


def carry(edited, before, after, partly):
    """Carries an edit of the rung `edited` to all others. Returns what to say of each rung, the
    conflicts as (from, to, conflict), and the new lines of each script that changes."""
    said, conflicts, changed = {}, [], {}
    queue = [(edited, neighbor, before, after) for neighbor in neighbors(edited)]
    while queue:
        source, rung, before, after = queue.pop(0)
        lines = read(script(rung))
        result = merge(before, after, lines)
        conflicts += [(source, rung, conflict) for conflict in result.conflicts]
        if result.conflicts and not partly:
            said[rung] = f"conflict at line {result.conflicts[0].line}, left untouched"
        else:
            if result.after != lines:
                changed[rung] = result.after
            said[rung] = "unchanged" if result.after == lines else "applied"
            if result.conflicts:
                said[rung] = f"conflict at line {result.conflicts[0].line}, {said[rung]} in part"
        for neighbor in neighbors(rung):
            if neighbor == source:
                continue
            if result.conflicts and not partly:
                for other in beyond(rung, neighbor):
                    said[other] = f"not reached, it lies beyond {rung}"
            else:
                queue.append((rung, neighbor, result.before, result.after))
    return said, conflicts, changed


def beyond(source, rung):
    """A rung and all those that are reached through it, coming from `source`."""
    found = [rung]
    for neighbor in neighbors(rung):
        if neighbor != source:
            found += beyond(rung, neighbor)
    return found


def read(path):
    return path.read_text(encoding="utf-8").splitlines(keepends=True)


def committed(rung, base):
    """The lines of a rung's script in a commit."""
    name = script(rung).relative_to(ROOT).as_posix()
    command = ["git", "show", f"{base}:./{name}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8")
    if result.returncode != 0:
        fail(f"git has no {name} in {base}: {result.stderr.strip()}")
    return result.stdout.splitlines(keepends=True)


def show(source, rung, conflict):
    """Prints a hunk that does not fit, and what is in its place."""
    path = script(rung).relative_to(ROOT)
    print(f"\n{path}:{conflict.line}: this part of the edit, as it is in {source}, does not fit")
    print("".join([f"-{line}" for line in conflict.removed]), end="")
    print("".join([f"+{line}" for line in conflict.added]), end="")
    print(f"{rung} has in this place:" if conflict.there else f"{rung} has no line in this place.")
    print("".join([f" {line}" for line in conflict.there[:20]]), end="")
    if len(conflict.there) > 20:
        print(f" … and {len(conflict.there) - 20} more lines")


def main():
    parser = argparse.ArgumentParser(
        description="Carries an edit of one rung's train-llm.py into those of all other rungs."
    )
    parser.error = fail  # one line, without the usage
    parser.add_argument("rung", choices=RUNGS, help="the rung that was edited")
    parser.add_argument("--base", default="HEAD", help="the commit before the edit (HEAD)")
    parser.add_argument(
        "--partly",
        action="store_true",
        help="let a rung with a conflict, and those beyond it, take over the other hunks",
    )
    args = parser.parse_args()

    before, after = committed(args.rung, args.base), read(script(args.rung))
    if before == after:
        fail(f"{args.rung}/train-llm.py is the same in {args.base} and in the work tree")
    said, conflicts, changed = carry(args.rung, before, after, args.partly)
    for rung, lines in changed.items():
        script(rung).write_text("".join(lines), encoding="utf-8")

    for rung in RUNGS:
        if rung != args.rung:
            print(f"{rung}: {said[rung]}")
    for source, rung, conflict in conflicts:
        show(source, rung, conflict)
    return 1 if conflicts else 0


if __name__ == "__main__":
    sys.exit(main())

"""Writes the page of a stage: its script, the comments beside the code, and what is new marked.

    python read.py 02                         what stage 02 adds to its parent
    python read.py                            all stages, and an index of them
    python read.py my-train.py --parent 03    what you have changed in a copy of stage 03

A page is one HTML file that needs no network. It opens in a browser if there is a display. A note
opens below its line of code: notes.md in the folder of a stage has them, below headings that are
lines of its script. The first paragraph of a note is the question, and the others are the answer.
"""

import argparse
import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tokenize
import webbrowser
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from inspect import cleandoc
from itertools import groupby, pairwise, zip_longest
from pathlib import Path

from markdown import markdown
from pygments import lex
from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES, String

ROOT = Path(__file__).resolve().parent
# Each stage is its parent plus one idea. The tests and the benchmarks take this from here.
PARENTS = {
    "02-ddp": "01-single-gpu",
    "03-fsdp": "02-ddp",
    "04-compression": "03-fsdp",
    "05-multinode": "04-compression",
    "06-streaming": "05-multinode",
    "07-tensor-parallel": "03-fsdp",
    "08-pipeline-parallel": "03-fsdp",
    "09-context-parallel": "03-fsdp",
    "10-expert-parallel": "03-fsdp",
}
STAGES = ["01-single-gpu", *PARENTS]

CONTEXT = 3  # lines that are shown before and after a change
LONG_PIECE = 20  # of a piece with more lines of code, only the lines near a change are shown
SHORTEST_FOLD = 6
WORD = r"\S*`[^`]+`\S*|\S+"


@dataclass(eq=False)
class Line:
    """A line of a script. A piece is a list of lines: a comment, and the code that it is about."""

    number: int
    tokens: list = field(default_factory=list)  # (CSS class of pygments, text)
    prose: str | None = None  # the text of a comment or docstring, which goes into the margin
    begins: bool = False  # a piece
    is_import: bool = False
    function: str = ""  # the function or class around it
    notes: list = field(default_factory=list)  # (question, answer), in HTML
    mark: str = " "  # "-": only in the parent, "+": only in the child
    partner: "Line | None" = None  # the line of the parent that has become this one, or the reverse
    changed: set = field(default_factory=set)  # indices of tokens that its partner does not have
    shown: bool = True  # not folded

    @property
    def text(self):
        return "".join(text for _, text in self.tokens)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("script", nargs="?", help="a stage, such as 02, or a file, default: all stages")
    add("--parent", help="the stage or file to compare with, default: the parent of the stage")
    add("-o", "--output", type=Path, default=ROOT / "outputs" / "read", help="a folder")
    add("--links", help="the URL that links to the repository begin with, default: a relative path")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    base = args.links or os.path.relpath(ROOT, args.output.resolve())
    if args.script:
        stage, path = find(args.script)
        if not stage and not args.parent:
            fail(f"{args.script} is not a stage: say with --parent what to compare it with")
        name = stage[:2] or path.stem
        if not stage and name in ("index", *(other[:2] for other in STAGES)):
            name = f"my-{name}"
        page = args.output / f"{name}.html"
        write_page(page, stage, path, args.parent or PARENTS.get(stage), base)
    else:
        for stage in STAGES:
            page = args.output / f"{stage[:2]}.html"
            write_page(page, *find(stage), PARENTS.get(stage), base, with_links=True)
        page = args.output / "index.html"
        write(page, kind="index", title="Stages", body=f"<ul>{tree(STAGES[0])}</ul>")
    print(page)
    if sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
        webbrowser.open(page.resolve().as_uri())


def fail(message):
    sys.exit(f"read.py: error: {message}")


def find(name):
    """The stage with this name or number, "" if it is the path of a file, and the script."""
    for stage in STAGES:
        if name in (stage, stage[:2]):
            return stage, ROOT / stage / "train-llm.py"
    if not Path(name).is_file():
        fail(f"{name} is neither a stage, such as 02, nor a file")
    return "", Path(name)


def write_page(page, stage, path, parent, base, with_links=False):
    """The page of a script: against its parent, or as a whole if `parent` is None.

    `with_links`: to other pages, which must be written too."""
    title = html.escape(stage or path.name)
    lines = read_script(path)
    if parent:
        parent_stage, parent_path = find(parent)
        lines = merge(parent_path, path)
        name = html.escape(parent_stage or parent_path.name)
        link = f'<a href="{name[:2]}.html">{name}</a>' if with_links else name
        title += f" <span>compared with {link}</span>"
    links = '<a href="index.html">all stages</a>' if with_links else ""
    if stage:
        links = f'<a href="{base}/{stage}/README.md">chapter</a> {links}'
        add_notes(path.with_name("notes.md"), lines, f"{base}/{stage}")
    size = "+{} −{} lines".format(*count(lines)) if parent else f"{len(lines)} lines"
    body, contents = page_body(cut(lines), parent)
    write(page, "diff" if parent else "whole", title, body, contents, size, links)


def write(page, kind, title, body, contents="", size="", links=""):
    values = {"kind": kind, "title": title, "name": re.sub("<.*?>", "", title), "size": size}
    values |= {"contents": contents, "body": body, "links": links}
    template = (ROOT / "read.html").read_text(encoding="utf-8")
    text = re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)
    page.write_text(text, encoding="utf-8")


def tree(stage):
    """An entry of the index for a stage, and below it those of the stages that add to it."""
    _, path = find(stage)
    lines = read_script(path)
    size = f"{len(lines)} lines"
    if stage in PARENTS:
        added, removed = count(merge(find(PARENTS[stage])[1], path))
        size += f", +{added} −{removed}"
    about = code_spans(html.escape(lines[0].prose.partition(": ")[2]))
    children = "".join(tree(child) for child, parent in PARENTS.items() if parent == stage)
    entry = f'<a href="{stage[:2]}.html">{stage}</a> <span>{size}</span><p>{about}</p>'
    return f"<li>{entry}<ul>{children}</ul>"


# From files to lines.


def read_script(path):
    """The lines of a script, highlighted, and what is known about each."""
    source = path.read_text(encoding="utf-8-sig").removesuffix("\n") + "\n"
    lines = [Line(number) for number in range(1, source.count("\n") + 2)]
    index = 0
    for kind, text in lex(source, PythonLexer(stripnl=False)):
        parts = text.split("\n")
        if kind in String.Doc:
            prose = cleandoc(text.strip("\"'")).split("\n")
            for line, part in zip_longest(lines[index : index + len(parts)], prose, fillvalue=""):
                line.prose = part
        for i, part in enumerate(parts):
            index += i > 0
            if part:
                lines[index].tokens.append((STANDARD_TYPES[kind], part))
    lines.pop()  # what follows the last line break

    name, in_import = "", False
    for line in lines:
        if re.match("[^ )]", line.text):
            in_import = line.text.startswith(("from ", "import "))
        line.is_import = in_import
        if match := re.match(r"(?:def|class) (\w+)", line.text):
            name = match[1]
        elif name and re.match(r"[\w@]", line.text):
            name, line.begins = "", True
        line.function = name
        line.begins |= re.match(" *(@|def |class )", line.text) is not None
    # Comments that are sentences. What follows code in the same line stays there.
    is_comment = [re.match(" *#", line.text) is not None for line in lines]
    for found, block in groupby(range(len(lines)), is_comment.__getitem__):
        block = list(block)
        if found and any(lines[i].text.endswith((".", ":", "?")) for i in block):
            if begins := first_of_piece(lines, block[0]):
                begins.begins = True
            for i in block:
                lines[i].prose = lines[i].text.strip()[2:]
    return lines


def first_of_piece(lines, index):
    """The line with which the piece of a comment begins. None if the comment does not begin one.

    A comment at the beginning of a loop is shown together with the first line of the loop, and a
    comment in a branch of an `if` together with the whole `if`."""
    comment = lines[index]
    for line in reversed(lines[:index]):
        if line.text.strip() and indentation(line) < indentation(comment):
            if re.match(r" *(if|elif|else|try|except|finally)\b", line.text):
                return None
            return line if line is lines[index - 1] and line.text.endswith(":") else comment
    return comment


def indentation(line):
    return len(line.text) - len(line.text.lstrip())


def merge(parent, child):
    """The lines of both scripts, as `git diff` shows them."""
    scripts = read_script(parent), read_script(child)
    options = ["--no-index", "--no-color", "--no-ext-diff", "--text", "-U1000000", "--"]
    variables = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    if not shutil.which("git"):
        fail("needs git")
    with tempfile.TemporaryDirectory() as folder:
        # Copies: no links, one kind of line end, and no attributes of a repository.
        copies = [Path(folder, name) for name in ("parent.py", "child.py")]
        for copy, script in zip(copies, scripts, strict=True):
            text = "".join(f"{line.text}\n" for line in script)
            copy.write_text(text, encoding="utf-8", newline="\n")
        command = ["git", "diff", *options, *copies]
        diff = subprocess.run(command, env=variables, capture_output=True, encoding="utf-8").stdout
    if not diff:
        fail(f"{child} is the same as {parent}")
    (old, new), lines = map(iter, scripts), []
    for text in diff[diff.index("\n@@") :].split("\n")[2:-1]:
        line = next(old) if text[0] == "-" else next(new)
        line.mark, line.partner = text[0], next(old) if text[0] == " " else None
        lines.append(line)
    result = []
    for is_changed, group in groupby(lines, lambda line: line.mark != " "):
        group = list(group)
        result += in_order(group) if is_changed else group
    return result


def in_order(group):
    """Changed lines, each removed one directly before the new line that it has become, if any."""
    added = [line for line in group if line.mark == "+"]
    result = []
    for line in group[: len(group) - len(added)]:
        ratios = [SequenceMatcher(None, names(line), names(other)).ratio() for other in added]
        common = [len(set(names(line)) & set(names(other))) for other in added]
        best = max(range(len(added)), key=ratios.__getitem__, default=None)
        if best is None or ratios[best] <= 0.5 or common[best] < 2:
            result.append(line)
            continue
        new = added[best]
        result += [*added[:best], line, new]
        del added[: best + 1]
        line.partner, new.partner = new, line
        texts = [[text.strip() for _, text in one.tokens] for one in (line, new)]
        for tag, i1, i2, j1, j2 in SequenceMatcher(None, *texts).get_opcodes():
            if tag != "equal":
                line.changed |= set(range(i1, i2))
                new.changed |= set(range(j1, j2))
    return result + added


def names(line):
    """The names in a line, by which a removed line is found again in the new ones."""
    return re.findall(r"(?!True|False|None)\b[A-Za-z]\w*", line.text)


def count(lines):
    marks = [line.mark for line in lines]
    return marks.count("+"), marks.count("-")


def add_notes(path, lines, base):
    """Gives each note of a file to the last line of its statement. Links in it begin at `base`."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    code = [line for line in lines if line.prose is None and line.mark != "-"]
    with tokenize.open(path.with_name("train-llm.py")) as source:
        tokens = list(tokenize.generate_tokens(source.readline))
    ends = {token.start[0] for token in tokens if token.type == tokenize.NEWLINE}
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        heading = heading.strip().strip("`")
        whole = [line for line in code if line.text.strip() == heading]
        found = whole or [line for line in code if heading in line.text]
        if len({line.text.strip() for line in found}) != 1:
            fail(f"{path}: {len(found)} lines of the script have `{heading}`, and not one")
        question, _, answer = text.strip().partition("\n\n")
        if not answer:
            fail(f"{path}: `{heading}` needs a question and, in another paragraph, the answer")
        answer = re.sub(r"\]\((?![a-z]+:)", f"]({base}/", answer)
        question = markdown(question).removeprefix("<p>").removesuffix("</p>")
        end = next(line for line in code if line.number >= found[0].number and line.number in ends)
        end.notes.append((question, markdown(answer, extensions=["tables", "fenced_code"])))


def cut(lines):
    """Cuts the lines into pieces, where a line begins one."""
    pieces = [[]]
    for line in lines:
        piece = pieces[-1]
        code = [other for other in piece if other.prose is None]
        begins = line.begins and (line.mark != "-" or line.prose is not None)
        if begins and code and not code[-1].begins:
            pieces.append([])
        pieces[-1].append(line)
    return pieces


# From pieces to a page.


def page_body(pieces, parent):
    """The body of a page and its contents. Without a parent, nothing is folded."""
    if parent:
        choose_shown(pieces)
    parts = [list(part) for piece in pieces for _, part in groupby(piece, lambda line: line.shown)]
    body, contents, num_stops = "", "", 0
    for is_shown, group in groupby(parts, lambda part: part[0].shown):
        group = list(group)
        text = ""
        for part in group:
            if parent:
                is_stop = is_shown and any(line.mark != " " for line in part)
            else:  # a function, and in main() what has a comment
                is_definition = re.match(" *(@|def |class )", part[0].text) is not None
                has_prose = any(line.prose for line in part)
                is_stop = has_prose and (part[-1].function == "main" or is_definition)
            num_stops += is_stop
            text += piece_html(part, f"stop{num_stops}" if is_stop else "")
            if is_stop and (heading := title(part)):
                functions = [line.function for line in part if line.mark == "+"]
                function = "".join(functions[:1]) or part[-1].function
                contents += f'<li><a href="#stop{num_stops}"><b>{function}</b> {heading}</a>'
        body += text if is_shown else fold(group, text, parent)
    return body, f"<details><summary>Contents</summary><ol>{contents}</ol></details>"


def choose_shown(pieces):
    """A piece with a change or a note is shown, of a long one what is near it, and what is before.

    Imports are not."""
    for before, piece in pairwise([[], *pieces]):
        marked = [(line.mark != " " or bool(line.notes)) and not line.is_import for line in piece]
        is_short = sum(line.prose is None for line in piece) <= LONG_PIECE
        for i, line in enumerate(piece):
            near = any(marked[max(0, i - CONTEXT) : i + CONTEXT + 1])
            line.shown = (near or (any(marked) and is_short)) and not line.is_import
        if marked[0]:
            for line in [line for line in before if line.prose is None][-CONTEXT:]:
                line.shown = True
    lines = [line for piece in pieces for line in piece]
    runs = [list(run) for _, run in groupby(lines, lambda line: line.shown)]
    for line in [line for run in runs if len(run) < SHORTEST_FOLD for line in run]:
        line.shown = True
    shown = False
    for is_code, run in groupby(reversed(lines), lambda line: line.prose is None):
        run = list(run)
        if not is_code:  # a comment is shown as a whole, and with the first line of its code
            for line in run:
                line.shown = shown or any(line.shown for line in run)
        shown = run[-1].shown


def fold(pieces, body, parent):
    """Hidden pieces, below a line that names what is in them."""
    lines = [line for piece in pieces for line in piece]
    added, removed = count(lines)
    size = f"+{added} −{removed}" if added + removed else f"as in {html.escape(parent)}"
    found = ["imports"] if any(line.is_import for line in lines) else []
    found += [match[1] for line in lines if (match := re.match(r"(?:def|class) (\w+)", line.text))]
    found = found or [title(piece) for piece in pieces if piece[0].prose]
    text = " · ".join(name.rstrip(".:") for name in found)
    label = f"{len(lines)} lines, {size}" + f": {text}" * bool(text)
    return f"<details class=fold><summary>{label}</summary>{body}</details>\n"


def title(lines):
    """The first sentence of the comments, of changed lines the first new one or else a question."""
    old = " ".join(line.prose for line in lines if line.prose and line.mark != "+")
    new = " ".join(line.prose for line in lines if line.prose and line.mark != "-")
    sentences = re.findall(r"\S.{12,}?[.:?](?=\s*$|(?<!:)\s)|\S.*$", new)
    questions = [question for line in lines for question, _ in line.notes]
    if any(line.mark != " " for line in lines):
        sentences = [sentence for sentence in sentences if sentence not in old]
        if questions and not sentences:
            return questions[0]
    return code_spans(html.escape(sentences[0])) if sentences else ""


def code_spans(text):
    return re.sub("`([^`]+)`", r"<code>\1</code>", text)


def piece_html(lines, name=""):
    prose = [line for line in lines if line.prose is not None]
    code = [line for line in lines if line.prose is None]
    for end in (0, -1):
        while code and not code[end].text.strip():
            del code[end]
    if not prose and not code:
        return ""
    marks = {line.mark for line in prose}
    margin = "new" if marks == {"+"} else "old" if marks == {"-"} else ""
    rows = "".join(line_html(line) for line in code if not is_in_partner(line))
    return (
        f'<section class="piece {"stop" if name else ""}" id="{name}">'
        f'<div class="margin {margin}">{prose_html(lines)}</div>'
        f"<div class=code>{rows}</div></section>\n"
    )


def is_in_partner(line):
    """Whether all of a removed line is in what it has become, or whether it is empty."""
    return line.mark == "-" and not (line.changed if line.partner else line.text.strip())


def line_html(line):
    """A line of code with its number, and the note below it."""
    kind = {"+": "add", "-": "del", " ": ""}[line.mark]
    if line.mark == "+" and line.partner and not line.partner.changed:
        kind = "chg"
    text = ""
    for i, (token, part) in enumerate(line.tokens):
        is_marked = i in line.changed and (i or part.strip())
        part = html.escape(part, quote=False)
        part = f"<span class={token}>{part}</span>" if token and part.strip() else part
        text += f"<mark>{part}</mark>" if is_marked else part
    code = text.lstrip()
    indent = len(text) - len(code)
    result = (
        f'<div class="l {kind}"><s>{line.number}</s><span class=c style="--i:{indent}">'
        f"<q>{' ' * indent}</q>{wrap(line.mark, code)}</span></div>"
    )
    for question, answer in line.notes:
        result += f"<details class=note><summary>{question}</summary>{answer}</details>"
    return result


def wrap(mark, text):
    tag = {"+": "ins", "-": "del"}.get(mark)
    return f"<{tag}>{text}</{tag}>" if tag else text


def prose_html(lines):
    """The text of the comments of a piece, with the words marked that are new or removed."""
    old, new = prose_words(lines, "+"), prose_words(lines, "-")
    parts, removed, added = [], [], []
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal" and (i2 - i1 > 3 or i2 == len(old)):
            parts += removed + added + [(" ", word) for word in old[i1:i2]]
            removed, added = [], []
        else:
            removed += [("-", word) for word in old[i1:i2]]
            added += [("+", word) for word in new[j1:j2]]
    runs = groupby(parts + removed + added, lambda part: part[0])
    return code_spans(" ".join(wrap(mark, " ".join(word for _, word in run)) for mark, run in runs))


def prose_words(lines, other):
    """The words of the comments in lines without the mark `other`, and breaks of paragraphs."""
    words, was_prose = [], True
    for line in [line for line in lines if line.mark != other]:
        if line.prose is not None:
            if words and (not was_prose or not line.prose):
                words.append("<i class=gap></i>")
            text = html.escape(line.prose, quote=False)
            is_code = text.startswith("    ")
            words += [f"<i class=pre>{text[4:]}</i>"] if is_code else re.findall(WORD, text)
        was_prose = line.prose is not None
    return words


if __name__ == "__main__":
    main()

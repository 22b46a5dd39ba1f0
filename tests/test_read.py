"""read.py: the page of a stage, what has changed, and the notes below single lines."""

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from conftest import ROOT, STAGES, environment, script
from stages import PAIRS, PARENTS
from test_stages import git_diff

pytestmark = pytest.mark.law2


def run_read(*arguments, root=ROOT, **variables):
    command = [sys.executable, root / "read.py", *arguments]
    variables = environment(**{"DISPLAY": "", "WAYLAND_DISPLAY": "", **variables})
    variables = {name: value for name, value in variables.items() if value}
    return subprocess.run(
        list(map(str, command)), env=variables, capture_output=True, text=True, timeout=300
    )


def words(text):
    return re.findall(r"\w+", text)


class Page(HTMLParser):
    """The text of a page by what it is: its code, line by line, and the words in its margin."""

    def __init__(self, text):
        super().__init__()
        self.classes, self.code, self.margin, self.marked = [], {}, [], set()
        self.number = None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "li", "a", "p"):
            self.classes.append((tag, (dict(attributes).get("class") or "").split()))

    def handle_endtag(self, tag):
        if tag in [tag for tag, _ in self.classes]:
            while self.classes.pop()[0] != tag:
                pass

    def handle_data(self, text):
        tags = [tag for tag, _ in self.classes]
        classes = {name for _, names in self.classes for name in names}
        if "note" in classes or "del" in tags or "del" in classes:
            return
        if "margin" in classes:
            self.margin += words(text)
        elif "code" in classes and tags[-1] == "s":
            self.number = int(text)
            self.code[self.number] = ""
            self.marked |= {self.number} if classes & {"add", "chg"} else set()
        elif "l" in classes:
            self.code[self.number] += text


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A folder with all pages."""
    folder = tmp_path_factory.mktemp("pages")
    result = run_read("-o", folder)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{folder / 'index.html'}\n"
    return folder


@pytest.mark.parametrize("stage", STAGES)
def test_all_of_the_script_is_on_its_page_once(pages, stage):
    """Each line is in the code, or its words are in the margin, and nothing else is there."""
    page = Page((pages / f"{stage[:2]}.html").read_text())
    lines = dict(enumerate(script(stage).read_text().splitlines(), 1))
    assert all(lines[number] == text for number, text in page.code.items())
    assert list(page.code) == sorted(page.code)
    rest = [text for number, text in lines.items() if number not in page.code]
    assert words("\n".join(rest)) == page.margin


@pytest.mark.parametrize(("parent", "stage"), PAIRS)
def test_the_page_counts_what_git_counts(pages, parent, stage):
    added, removed, *_ = git_diff(parent, stage, "--numstat").split()
    text = (pages / f"{stage[:2]}.html").read_text()
    assert f"+{added} −{removed} lines" in text
    page, new = Page(text), set()
    for start, length in re.findall(
        r"^@@ \S+ \+(\d+),?(\d*)", git_diff(parent, stage, "-U0"), re.M
    ):
        new |= set(range(int(start), int(start) + int(length or 1)))
    # Of two blank lines, git with a context may call another one new than git without.
    assert {n for n in page.marked if page.code.get(n)} <= new
    assert {n for n in new & page.code.keys() if page.code[n]} <= page.marked


def test_the_index_shows_the_tree_of_stages(pages):
    text = (pages / "index.html").read_text()
    assert re.findall(r'href="(\d\d)\.html"', text) == [stage[:2] for stage in STAGES]
    for parent, stage in PAIRS:
        added, removed, *_ = git_diff(parent, stage, "--numstat").split()
        size = len(script(stage).read_text().splitlines())
        assert f"{stage}</a> <span>{size} lines, +{added} −{removed}<" in text
    assert text.index("04-compression") < text.index("05-multinode") < text.index("07-tensor")


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_has_notes(pages, stage):
    """Each has a question and an answer, and no two of a stage ask the same."""
    questions = re.findall(r"^## `.*`\n\n(.*)$", (ROOT / stage / "notes.md").read_text(), re.M)
    text = (pages / f"{stage[:2]}.html").read_text()
    assert 8 <= len(questions) == len(set(questions)) == text.count("<details class=note>")
    assert all(question.endswith("?") for question in questions)


@pytest.fixture
def course(tmp_path):
    """A folder with what read.py needs, to change it."""
    shutil.copy(ROOT / "read.py", tmp_path)
    shutil.copy(ROOT / "read.html", tmp_path)
    for stage in STAGES:
        (tmp_path / stage).mkdir()
        shutil.copy(script(stage), tmp_path / stage)
    return tmp_path


@pytest.mark.parametrize(
    ("notes", "error"),
    [
        ("## `no such line`\n\nWhy?\n\nBecause.\n", "0 lines of the script have `no such line`"),
        ("## `dist.all_reduce(`\n\nWhy?\n\nBecause.\n", "and not one"),
        (
            "## `def main(args):`\n\nWhy?\n",
            "needs a question and, in another paragraph, the answer",
        ),
    ],
)
def test_a_note_that_does_not_fit_is_an_error(course, notes, error):
    (course / "02-ddp" / "notes.md").write_text(notes)
    result = run_read("02", root=course)
    assert result.returncode != 0 and "Traceback" not in result.stderr
    assert error in result.stderr and str(course / "02-ddp" / "notes.md") in result.stderr


def test_links_of_notes_lead_to_the_repository(course):
    notes = "## `def main(args):`\n\nWhy?\n\nSee [a](deeper.md#b), [c](https://d.org/e).\n"
    (course / "02-ddp" / "notes.md").write_text(notes)
    for options, base in [((), "../.."), (("--links", "https://host/tree"), "https://host/tree")]:
        assert run_read("02", *options, root=course).returncode == 0
        text = (course / "outputs" / "read" / "02.html").read_text()
        assert f'href="{base}/02-ddp/deeper.md#b"' in text and 'href="https://d.org/e"' in text
        assert f'href="{base}/02-ddp/README.md"' in text
        assert '.html"' not in text, "other pages have not been written"


def test_a_copy_of_a_script_is_compared_with_its_parent(tmp_path):
    """Also one without a line break at its end, and one with a mistake."""
    mine = tmp_path / "my-train.py"
    text = script("03-fsdp").read_text()
    mine.write_text(text.replace('1.0, help="clip', '0.5, help="clip') + "if True\n    <oops>")
    result = run_read(mine, "--parent", "03", "-o", tmp_path)
    assert result.returncode == 0, result.stderr
    page = (tmp_path / "my-train.html").read_text()
    assert "my-train.py" in page and "+3 −1 lines" in page and ">oops<" in page
    assert "<details class=note>" not in page, "notes are about the scripts of the course"
    for arguments, error in [
        ([mine], "--parent"),
        (["99"], "99 is neither a stage"),
        ([script("03-fsdp"), "--parent", "03"], "is the same as"),
    ]:
        result = run_read(*arguments, "-o", tmp_path)
        assert result.returncode != 0 and error in result.stderr and "Trace" not in result.stderr


def test_a_page_opens_in_a_browser_if_there_is_a_display(tmp_path):
    """A program called `browser` writes down what it is asked to open."""
    program = tmp_path / "browser"
    program.write_text(f'#!/bin/sh\necho "$1" > "{tmp_path}/opened"\n')
    program.chmod(0o755)
    result = run_read("02", "-o", tmp_path, DISPLAY=":0", BROWSER=f"{program} %s")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "opened").read_text().strip() == (tmp_path / "02.html").as_uri()
    (tmp_path / "opened").unlink()
    assert run_read("02", "-o", tmp_path, BROWSER=f"{program} %s").returncode == 0
    assert not (tmp_path / "opened").exists()


def test_no_sentence_of_the_contents_needs_one_before_it(pages):
    """An entry is read alone, so it does not begin with a word that refers to something else."""
    backward = "Otherwise|Then|They|It|Its|This|These|That|Those|So|Here|Before that|Both|Such"
    for stage in PARENTS:
        text = (pages / f"{stage[:2]}.html").read_text()
        titles = re.findall(r"<li><a href=[^>]*><b>\w*</b> (.*?)</a>", text)
        assert len(titles) > 10
        found = [title for title in titles if re.match(rf"({backward})\b", title)]
        assert not found, f"{stage}: {found}"

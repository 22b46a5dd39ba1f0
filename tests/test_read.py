"""read.py: the page of a stage, what is marked as new, notes below lines, and that in a browser."""

import html
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, STAGES, environment, script
from stages import PAIRS
from test_stages import git_diff

pytestmark = pytest.mark.law2


def run_read(*arguments, root=ROOT, **variables):
    variables = environment(**{"DISPLAY": "", "WAYLAND_DISPLAY": "", **variables})
    variables = {name: value for name, value in variables.items() if value}
    command = [str(word) for word in (sys.executable, root / "read.py", *arguments)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A folder with all pages."""
    folder = tmp_path_factory.mktemp("pages")
    assert run_read("-o", folder).stdout == f"{folder / 'index.html'}\n"
    return folder


def rows(page):
    """The lines of code on a page: their kind, number and text."""
    found = re.findall(r'<div class="l (\w*)"><s>(\d+)</s>(.*?)</span></div>', page)
    return [(kind, int(number), plain(text)) for kind, number, text in found]


def plain(text):
    return html.unescape(re.sub("<[^>]*>", "", text))


@pytest.mark.parametrize("stage", STAGES)
def test_all_of_the_script_is_on_its_page_once(pages, stage):
    """As code, or its words are in the margin. And each note of the stage is below a line."""
    page = (pages / f"{stage[:2]}.html").read_text()
    code = {number: text for kind, number, text in rows(page) if kind != "del"}
    lines = dict(enumerate(script(stage).read_text().splitlines(), 1))
    assert list(code) == sorted(code) and code.items() <= lines.items()
    margins = re.findall('<div class="margin.*?">(.*?)</div>', page)
    margin = plain(re.sub("<del>.*?</del>", "", " ".join(margins)))
    rest = " ".join(lines[number] for number in lines if number not in code)
    assert re.findall(r"\w+", margin) == re.findall(r"\w+", rest)
    notes = (ROOT / stage / "notes.md").read_text()
    assert page.count("<details class=note>") == len(re.findall("^## ", notes, re.M)) > 7


@pytest.mark.parametrize(("parent", "stage"), PAIRS)
def test_the_marked_lines_are_those_of_git_diff(pages, parent, stage):
    """Their numbers too, on the page and in the index."""
    added, removed, *_ = git_diff(parent, stage, "--numstat").split()
    page = (pages / f"{stage[:2]}.html").read_text()
    assert f"+{added} −{removed} lines" in page
    size = f"{len(script(stage).read_text().splitlines())} lines, +{added} −{removed}"
    assert f"{stage}</a> <span>{size}<" in (pages / "index.html").read_text()
    diff = git_diff(parent, stage, "-U100000").split("\n@@")[1].splitlines()[1:]
    old, new = ([line for line in diff if line[0] in (" ", side)] for side in "-+")
    for kind, number, text in rows(page):
        sign = {"": " ", "del": "-"}.get(kind, "+")
        assert (old if kind == "del" else new)[number - 1] == sign + text


NOTES = "## `def main(args):`\n\nWhy?\n\nSee [a](deeper.md#b), [c](https://d.org/e).\n"
# Notes of stage 02, the command line, and the error.
ERRORS = [
    ("## `no such line`\n\nWhy?\n\nA.\n", "02", "0 lines of the script have `no such line`"),
    ("## `dist.all_reduce(`\n\nWhy?\n\nA.\n", "02", "and not one"),
    ("## `def main(args):`\n\nWhy?\n", "02", "and, in another paragraph, the answer"),
    (NOTES, "mine.py", "--parent"),
    (NOTES, "99", "99 is neither a stage"),
    (NOTES, "02-ddp/train-llm.py --parent 02", "is the same as"),
]


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A folder with what read.py needs of the course, to change it. It is the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("read.py", "read.html", "01-single-gpu/train-llm.py", "02-ddp/train-llm.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, name)
    (tmp_path / "mine.py").write_text(script("02-ddp").read_text() + "if True\n    <oops>")
    (tmp_path / "02-ddp" / "notes.md").write_text(NOTES)
    return tmp_path


@pytest.mark.parametrize(("notes", "arguments", "error"), ERRORS)
def test_an_error_is_one_line(course, notes, arguments, error):
    (course / "02-ddp" / "notes.md").write_text(notes)
    result = run_read(*arguments.split(), root=course)
    assert result.returncode != 0 and len(result.stderr.splitlines()) == 1
    assert error in result.stderr


@pytest.mark.parametrize("base", ["../..", "https://host/tree"])
def test_links_of_notes_lead_to_the_repository(course, base):
    assert run_read("02", *(["--links", base] if ":" in base else []), root=course).returncode == 0
    text = (course / "outputs" / "read" / "02.html").read_text()
    assert f'href="{base}/02-ddp/deeper.md#b"' in text and 'href="https://d.org/e"' in text
    assert f'href="{base}/02-ddp/README.md"' in text
    assert '.html"' not in text, "other pages have not been written"


@pytest.mark.parametrize("display", [":0", ""])
def test_the_page_of_ones_own_copy_opens_if_there_is_a_display(course, display):
    """Here of one with a mistake, and without a line break at its end."""
    more = {"DISPLAY": display, "BROWSER": "echo opened %s"}
    out = run_read("mine.py", "--parent", "02", "-o", course, root=course, **more).stdout
    assert (f"opened {course.as_uri()}/mine.html" in out) == bool(display)
    page = (course / "mine.html").read_text()
    assert "+2 −0 lines" in page and ">oops<" in page


def test_only_what_was_edited_is_marked(course):
    """Not what Windows writes differently, nor a link, nor what attributes say. Its page does not
    replace that of a stage."""
    text = (
        script("02-ddp").read_text().replace('"--seed", type=int, default=0', '"--seed", type=int')
    )
    mine = course / "mine.py"
    mine.write_text(text, encoding="utf-8-sig", newline="\r\n")
    (course / "02.py").symlink_to(mine)
    (course / ".gitattributes").write_text("*.py binary\n")
    subprocess.run(["git", "init", "-q"], check=True)
    assert run_read("02.py", "--parent", "02", "-o", course, root=course).returncode == 0
    assert "+1 −1 lines" in (course / "my-02.html").read_text()
    result = run_read("02.py", "--parent", "02", root=course, PATH=str(course))
    assert result.stderr == "read.py: error: needs git\n"


@pytest.fixture
def page(pages):
    """A page of a browser, which reports no error there and asks for no other file."""
    api = pytest.importorskip("playwright.sync_api", reason="needs the packages of '.[browser]'")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if not chromium:
        pytest.skip("needs chromium: apt-get install chromium")
    seen = []
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        for event in ("pageerror", "console", "request"):
            page.on(event, lambda found: seen.append(found))
        yield page
        browser.close()
    assert len(seen) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["index", *(stage[:2] for stage in STAGES)])
def test_a_page_fits_a_window_and_a_phone_in_light_and_dark_colours(page, pages, name):
    page.goto((pages / f"{name}.html").as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    parts = "[...document.querySelectorAll('.c, .note, .margin')]"
    for width in (1400, 1000, 400):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(f"{parts}.every(part => part.scrollWidth <= part.clientWidth + 1)")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        style = "getComputedStyle(document.body)"
        colors = [page.evaluate(f"{style}.{part}") for part in ("backgroundColor", "color")]
        paper, ink = (sum(map(int, re.findall(r"\d+", color)[:3])) / 3 for color in colors)
        assert paper > 200 > 90 > ink if scheme == "light" else paper < 60 < 160 < ink


@pytest.mark.slow
def test_keys_folds_notes_and_copies_work(page, pages):
    page.goto((pages / "02.html").as_uri())
    for key in "nnnp":
        page.keyboard.press(key)
    assert page.locator("#where").inner_text().startswith("2 / ")
    line = page.locator(".l", has_text="dist.all_reduce(num_targets, group=data_group)")
    note = line.locator("xpath=following-sibling::*[1]")
    assert not note.locator("p").last.is_visible()
    note.locator("summary").click()
    assert note.locator("p").last.is_visible()

    # What is copied is code alone: no number, no note, no removed line, nothing that is folded.
    copied = page.evaluate("""() => {
        getSelection().selectAllChildren(document.querySelector('main'))
        const clipboardData = new DataTransfer()
        document.dispatchEvent(new ClipboardEvent('copy', {clipboardData}))
        return clipboardData.getData('text/plain')
    }""").splitlines()
    lines = iter(script("02-ddp").read_text().splitlines())
    assert all(line in lines for line in copied), "the lines of the script in their order"
    assert len(copied) == page.locator(".l:not(.del):visible").count() < 300
    page.click("#all")
    assert page.locator(".l:visible").count() == page.locator(".l").count() > 450

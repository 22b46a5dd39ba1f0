"""The pages of read.py in a real browser, driven by playwright."""

import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, STAGES, script

try:
    from playwright.sync_api import sync_playwright
except ImportError:
    sync_playwright = None

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.law2,
    pytest.mark.skipif(not CHROMIUM, reason="needs chromium: apt-get install chromium"),
    pytest.mark.skipif(not sync_playwright, reason="needs playwright: pip install -e '.[browser]'"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    command = [sys.executable, ROOT / "read.py", "-o", folder]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return folder


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, folder):
    """Opens a page. At the end, it has reported no error, and has asked for no other file."""
    pages, problems = [], []

    def opener(name, width=1400, scheme="light"):
        size = {"width": width, "height": 900}
        page = browser.new_page(viewport=size, color_scheme=scheme)
        page.set_default_timeout(120_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text))
        page.on("request", lambda request: problems.append(request.url))
        name = name if name == "index" else name[:2]
        page.goto((folder / f"{name}.html").as_uri())
        assert problems.pop(0) == page.url
        pages.append(page)
        return page

    yield opener
    for page in pages:
        page.close()
    assert not problems


@pytest.mark.parametrize("stage", STAGES)
def test_all_of_the_script_can_be_seen(open_page, stage):
    """With nothing folded, each line is visible once, in the order of the script: in the code as
    it stands, or as words in the margin."""
    page = open_page(stage)
    if stage != STAGES[0]:
        page.click("#all")
    rows = page.locator(".l:not(.del):visible").all_inner_texts()
    rows = [re.match(r"(\d+)\s*(.*)", row, re.DOTALL).groups() for row in rows]
    numbers = [int(number) for number, _ in rows]
    assert numbers == sorted(set(numbers))
    lines = dict(enumerate(script(stage).read_text().splitlines(), 1))
    for number, text in rows:
        assert text.split() == lines[int(number)].split()
    margin = page.evaluate(
        """[...document.querySelectorAll('.margin')].map(margin => {
            margin = margin.cloneNode(true)
            margin.querySelectorAll('del').forEach(part => part.remove())
            return margin.textContent
        }).join(' ')"""
    )
    rest = " ".join(text for number, text in lines.items() if number not in numbers)
    assert re.findall(r"\w+", margin) == re.findall(r"\w+", rest)


@pytest.mark.parametrize("stage", [*STAGES, "index"])
def test_nothing_is_wider_than_the_window(open_page, stage):
    page = open_page(stage)
    page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    too_wide = "[...document.querySelectorAll('.c, .note, .margin')]"
    too_wide += ".filter(part => part.scrollWidth > part.clientWidth + 1).length"
    for width in (1400, 1000, 400):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(too_wide) == 0


def test_keys_folds_and_contents(open_page):
    open_page("index").keyboard.press("n")  # does nothing
    page = open_page("02-ddp")
    lines = page.locator(".l:visible")
    folded = lines.count()
    for _ in range(3):
        page.keyboard.press("n")
    page.keyboard.press("p")
    assert page.locator("#where").inner_text().startswith("2 / ")
    top = page.locator(".here").bounding_box()["y"]
    assert page.locator("header").bounding_box()["height"] <= top < 200, "below the header"
    page.locator(".fold > summary").first.click()
    assert lines.count() > folded
    page.click("#all")
    assert lines.count() > 450 > 300 > folded
    page.click("#all")
    assert lines.count() == folded
    page.click(".contents summary")
    page.locator(".contents a", has_text="DDP copies the weights").click()
    here = page.locator(page.evaluate("location.hash"))
    assert "DistributedDataParallel(model" in here.inner_text()
    page.keyboard.press("n")
    page.keyboard.press("p")
    assert page.locator(".here").get_attribute("id") == here.get_attribute("id")


def test_a_note_opens_below_its_line(open_page):
    page = open_page("02-ddp")
    line = page.locator(".l", has_text="dist.all_reduce(num_targets, group=data_group)")
    note = line.locator("xpath=following-sibling::*[1]")
    assert note.get_attribute("class") == "note"
    answer = note.locator("p").last
    assert not answer.is_visible()
    note.locator("summary").click()
    assert answer.is_visible()
    assert line.bounding_box()["y"] < note.bounding_box()["y"] < line.bounding_box()["y"] + 40


def test_what_is_copied_is_plain_code(open_page):
    """No numbers, no removed lines, no comments of the margin, no notes, not even open ones, and
    nothing that is folded. The indentation is that of the script."""
    page = open_page("02-ddp")
    page.evaluate("document.querySelectorAll('.note').forEach(note => note.open = true)")
    text = page.evaluate(
        """() => {
            const lines = [...document.querySelectorAll('.l')]
            const first = lines.find(line => line.textContent.includes('step_loss = torch.zeros'))
            const last = lines.find(line => line.textContent.includes('is_last_step = step =='))
            getSelection().setBaseAndExtent(first, 0, last, 2)
            const clipboardData = new DataTransfer()
            document.dispatchEvent(new ClipboardEvent('copy', {clipboardData}))
            return clipboardData.getData('text/plain')
        }"""
    )
    lines = script("02-ddp").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if "step_loss = torch.zeros" in line)
    last = next(i for i, line in enumerate(lines) if "is_last_step = step ==" in line)
    lines = [line for line in lines[first : last + 1] if not line.strip().startswith("#")]
    copied = text.splitlines()
    assert copied[0] == lines[0] and copied[-1] == lines[-1]
    assert 12 < len(copied) < len(lines), "some lines are folded"
    assert [line for line in lines if line.strip() and line in copied] == [
        line for line in copied if line.strip()
    ]


def test_light_and_dark(open_page):
    """The page follows the setting of the system."""
    colors = {}
    for scheme in ("light", "dark"):
        page = open_page("02-ddp", scheme=scheme)
        style = "getComputedStyle(document.body)"
        for part in ("backgroundColor", "color"):
            values = re.findall(r"\d+", page.evaluate(f"{style}.{part}"))
            colors[scheme, part] = sum(map(int, values[:3])) / 3
    assert colors["light", "backgroundColor"] > 200 > 90 > colors["light", "color"]
    assert colors["dark", "backgroundColor"] < 60 < 160 < colors["dark", "color"]


FIGURES = ROOT / "outputs" / "figures"


def test_the_page_of_schedules_agrees_with_the_formulas(browser):
    """Promise of schedules.html: the sliders show how long stages are idle, and what they keep."""
    page = browser.new_page()
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(FIGURES.joinpath("schedules.html").as_uri())
    for schedule in ("1f1b", "gpipe"):
        page.select_option("#schedule", schedule)
        for stages, micro_batches in ((1, 1), (2, 5), (4, 6), (4, 2), (8, 16)):
            for name, value in (("stages", stages), ("micro-batches", micro_batches)):
                page.fill(f"#{name}", str(value))
            slots = micro_batches + stages - 1
            assert page.inner_text("#length") == str(3 * slots)
            assert page.inner_text("#idle") == f"{100 * (stages - 1) / slots:.0f} %"
            most = [min(stages - k, micro_batches) for k in range(stages)]
            if schedule == "gpipe":
                most = [micro_batches] * stages
            assert page.locator(".kept").all_text_contents() == [str(number) for number in most]
            assert page.locator(".pass").count() == 2 * stages * micro_batches
    page.fill("#time", "3")
    assert page.locator(".pass:not(.later)").count() == 3 + 2 + 1  # of the stages 0, 1 and 2
    page.close()
    assert not problems


def test_the_steps_of_fsdp_move(browser):
    """Promise of fsdp-steps.svg: in each step it shows its own line, and a block at most twice."""
    page = browser.new_page()
    page.goto(FIGURES.joinpath("fsdp-steps.svg").as_uri())
    shown = """step => {
        const animations = document.getAnimations();
        const length = animations[0].effect.getComputedTiming().duration;
        for (const animation of animations) {
            animation.pause();
            animation.currentTime = (step + 0.5) * length / 11;
        }
        const visible = (node) => getComputedStyle(node).opacity === "1";
        const texts = [...document.querySelectorAll("text.title")].filter(visible);
        return [
            texts.map((node) => node.textContent).filter((text) => / of 11/.test(text)),
            [...document.querySelectorAll("rect.full")].filter(visible).length,
        ];
    }"""
    found = [page.evaluate(shown, step) for step in range(11)]
    assert [text[:2].strip(".") for [text], _ in found] == [
        f"{step + 1} "[:2] for step in range(11)
    ]
    assert [number for _, number in found] == [0, 0, 2, 2, 2, 0, 2, 2, 2, 0, 0]
    page.close()

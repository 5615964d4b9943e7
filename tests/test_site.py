"""The site in a real browser, headless Chromium: `make test-site`."""

from __future__ import annotations

import functools
import html.parser
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest
from conftest import NOTEBOOKS, PICTURES, ROOT

pytestmark = pytest.mark.site
PHONE, DESK = 390, 1440  # pixels
REPO = "ada/tpu-kit"


class Page(html.parser.HTMLParser):
    """What a page links to, what it can be linked at, and its images."""

    def __init__(self, path: Path):
        super().__init__()
        self.links, self.anchors, self.images = [], set(), []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.links += [given[name] for name in ("href", "src") if given.get(name)]
        self.anchors |= {given["id"]} if "id" in given else set()
        self.images += [given] if tag == "img" else []


def build(kit: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "tools/make_site.py"], cwd=kit, capture_output=True, text=True, check=False)


def copied(folder: Path) -> Path:
    """The kit without what it has built, to build the site in."""
    tracked = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for file in tracked.stdout.split("\n"):
        if (ROOT / file).is_file():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, folder / file)
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    kit = copied(tmp_path_factory.mktemp("kit"))
    return kit, build(kit)


@pytest.fixture(scope="module")
def site(built):
    kit, result = built
    assert result.returncode == 0, result.stderr
    return kit / "build" / "site"


@pytest.fixture(scope="module")
def pages(site):
    return {str(path.relative_to(site)): Page(path) for path in site.rglob("*.html") if "_static" not in path.parts}


@pytest.fixture(scope="module")
def address(site):
    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def visit(chromium, address):
    """Opens a page; what went wrong in it is in its `problems`."""
    opened = []

    def open_page(path: str, width: int = DESK, **options):
        page = chromium.new_page(viewport={"width": width, "height": 900}, **options)
        page.problems = []
        page.on("console", lambda said: page.problems.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("requestfailed", lambda request: page.problems.append(request.url))
        page.goto(f"{address}/{path}", wait_until="networkidle")
        opened.append(page)
        return page

    yield open_page
    for page in opened:
        page.close()


# --- what was built


def test_it_is_built_without_a_warning_and_says_where(built):
    _, result = built
    assert result.returncode == 0, result.stderr
    assert "WARNING" not in result.stdout + result.stderr
    assert result.stdout.endswith("build/site\n")
    assert "build/site/index.html" in result.stdout


def test_every_notebook_has_its_page_and_everything_to_look_up_too(pages):
    assert {f"notebooks/{path.stem}.html" for path in NOTEBOOKS} <= set(pages)
    assert {f"{page}.html" for page in ("cheatsheet", "messages", "platforms", "api", "exercises", "speed")} <= set(
        pages
    )


def test_every_internal_link_and_anchor_holds(site, pages):
    broken = []
    for name, page in pages.items():
        for link in page.links:
            if re.match(r"https?:|data:|mailto:|#$", link):
                continue
            file, _, anchor = link.partition("#")
            target = (site / name).parent / unquote(file.partition("?")[0]) if file else site / name
            target = target / "index.html" if target.is_dir() else target
            there = str(target.resolve().relative_to(site.resolve()))
            if not target.exists() or (anchor and unquote(anchor) not in pages[there].anchors):
                broken.append(f"{name}: {link}")
    assert not broken
    assert sum(len(page.links) for page in pages.values()) > 500


def test_a_broken_link_is_noticed(tmp_path):
    kit = copied(tmp_path)
    page = kit / "book" / "exercises.md"
    page.write_text(page.read_text() + "\n[nowhere](notebooks/04_fit.ipynb#No-such-section)\n")
    result = build(kit)
    assert result.returncode != 0
    assert "No-such-section" in result.stderr


def test_images_have_alternative_texts(pages):
    shown = [(name, image) for name, page in pages.items() for image in page.images]
    assert len(shown) > 40
    for name, image in shown:
        assert len(image.get("alt", "")) >= 40, f"{name}: {image.get('src')} has alt={image.get('alt')!r}"


def test_every_public_helper_is_on_the_page_of_the_modules(pages):
    for helper in ("tpu_helpers.connect", "tpu_helpers.make_dataset", "tpu_measure.diagnose", "tpu_keep.Keep"):
        assert helper in pages["api.html"].anchors
    assert "tpu_compiler.compile_for_tpu" in pages["api.html"].anchors


def test_what_is_offered_to_take_along_is_whole(site):
    for path in NOTEBOOKS:
        for name in (path.name, f"{path.stem}_exercises.ipynb"):
            nbformat.validate(nbformat.read(site / "files" / name, 4))
    assert (site / "files" / "tpu_helpers.py").read_bytes() == (ROOT / "tpu_helpers.py").read_bytes()


def test_the_cheat_sheet_is_one_page_of_pdf(site):
    content = (site / "files" / "cheatsheet.pdf").read_bytes()
    assert content.startswith(b"%PDF-")
    assert re.findall(rb"/Count (\d+)", content) == [b"1"]


def test_published_pages_open_in_colab_kaggle_and_binder(tmp_path):
    kit = copied(tmp_path)
    subprocess.run([sys.executable, "tools/publish.py", "links", REPO, "v1.0.0"], cwd=kit, check=True)
    result = build(kit)
    assert result.returncode == 0, result.stderr
    for path in NOTEBOOKS:
        links = Page(kit / "build" / "site" / "notebooks" / f"{path.stem}.html").links
        for host in ("colab.research.google.com/github", "kaggle.com/kernels/welcome", "mybinder.org/v2/gh"):
            assert [link for link in links if host in link and REPO in link and path.name in link], (path.stem, host)


# --- in the browser


def test_every_page_loads_without_an_error_and_fits_phone_and_desk(pages, visit):
    for name in pages:
        page = visit(name, DESK)
        for width in (DESK, PHONE):
            page.set_viewport_size({"width": width, "height": 900})
            page.wait_for_timeout(150)
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{name} is {wide} pixels wide on {width}"
            page.screenshot(path=PICTURES / f"site-{name.replace('/', '-').removesuffix('.html')}-{width}.png")
        assert not page.problems, (name, page.problems)
        assert page.locator("h1").count() == 1, name
        page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_accessibility_checker_finds_nothing(scheme, pages, visit):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = []
    for name in pages:
        page = visit(name, color_scheme=scheme)
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        for wrong in axe.run(page).response["violations"]:
            found.append((name, wrong["id"], [node["html"][:120] for node in wrong["nodes"]][:3]))
        page.close()
    assert not found, json.dumps(found, indent=1)


def test_the_checker_would_find_something(visit):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = visit("index.html")
    page.evaluate("document.querySelector('.bd-article img').removeAttribute('alt')")
    assert [wrong["id"] for wrong in axe.run(page).response["violations"]] == ["image-alt"]


@pytest.mark.parametrize("word", ["drop_remainder", "all-reduce", "bfloat16", "tune_batch_size"])
def test_search_finds(word, visit):
    page = visit(f"search.html?q={word}")
    page.locator("#search-results li").first.wait_for(timeout=15_000)
    found = page.locator("#search-results li a").all_inner_texts()
    assert found
    assert not page.problems
    if word == "drop_remainder":
        assert "Build an input pipeline" in " ".join(found)


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_search_is_reached_from_a_page(width, visit):
    page = visit("notebooks/04_fit.html", width)
    page.locator(".search-button-field:visible, .search-button:visible").first.click()
    page.keyboard.type("drop_remainder\n")
    page.locator("#search-results li").first.wait_for(timeout=15_000)
    assert "drop_remainder" in page.url


def test_dark_and_light_can_be_chosen(visit):
    page = visit("index.html", color_scheme="light")
    colours = set()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_timeout(300)
        colours.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(colours) == 2
    assert page.locator(".theme-switch-button").first.is_visible()


def test_a_solution_is_folded_until_it_is_asked_for(visit):
    page = visit("notebooks/04_fit.html")
    solutions = page.locator("details", has_text="Show the solution")
    assert solutions.count() == 2
    code = solutions.first.locator("pre").first
    assert not code.is_visible()
    solutions.first.locator("summary").click()
    assert code.is_visible()


def test_an_animation_can_be_stopped_and_stands_still_for_those_who_ask_for_that(visit):
    moving = visit("notebooks/03_build_model_in_scope.html")
    picture = moving.locator(".bd-article img[src$='.png'][alt^='Animation']")
    assert picture.count() == 1
    moving.get_by_role("button", name="Stop the animation").click()
    assert moving.locator("img[src^='data:image/png']").count() == 1
    still = visit("notebooks/03_build_model_in_scope.html", reduced_motion="reduce")
    assert still.locator("img[src^='data:image/png']").count() == 1
    still.get_by_role("button", name="Play the animation").click()
    assert still.locator(".bd-article img[src$='.png'][alt^='Animation']").count() == 1


@pytest.mark.parametrize("name", ["index", "cheatsheet", "notebooks/04_fit"])
def test_printed_there_is_the_article_alone(name, visit):
    page = visit(f"{name}.html", 794)  # A4 at 96 dots per inch
    page.emulate_media(media="print")
    for part in (".bd-header", ".bd-sidebar-primary", ".bd-sidebar-secondary"):
        assert not page.locator(part).first.is_visible(), part
    assert page.evaluate("document.documentElement.scrollWidth") <= 794
    page.pdf(path=PICTURES / f"site-{name.replace('/', '-')}.pdf", format="A4")

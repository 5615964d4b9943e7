"""Build the site: the notebooks with their stored outputs, and what one looks up, as pages in build/site/.

    python tools/make_site.py          # what `make site` calls

It stands in a file because the pages that repeat something (messages, platforms, times, downloads) are made from where
it stands already: the notebooks and the README. Sphinx does the rest, with book/conf.py; a wrong link ends the build.
"""

from __future__ import annotations

import ast
import os
import posixpath
import re
import shutil
import sys
from pathlib import Path

import sheet
from publish import NOTEBOOKS, ROOT, exercises, is_setup, load, published, save, standalone
from sphinx.cmd.build import main as sphinx

BOOK, PAGES, FILES, SITE = (ROOT / place for place in ("book", "build/book", "build/book-files", "build/site"))
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODULES = ("tpu_helpers.py", "tpu_measure.py", "tpu_keep.py", "tpu_compiler.py")
SECTIONS = {  # of the README: page, title
    "Open it where you are": ("platforms", "Where it runs"),
    "Ask the TPU compiler": ("compiler", "Ask the TPU compiler from the shell"),
    "How fast it is": ("speed", "How fast it is"),
    "Change something": ("change", "Change something"),
    "I only want …": ("index", ""),
}
TARGETS = {  # file of the kit: page that speaks of it
    "README.md": "index.md",
    "benchmarks/speed.md": "speed.md",
    "benchmarks/compiler.md": "predictions.md",
    "tools/data_service.py": "api.md#tools/data_service.py",
    **{file: f"api.md#{file.removesuffix('.py')}" for file in MODULES},
}


def section(heading: str) -> str:
    """That section of the README, without its heading."""
    found = re.search(rf"(?ms)^## {re.escape(heading)}$\n(.*?)(?=^## |\Z)", README)
    if not found:
        sys.exit(f"Refused: README.md has no section {heading!r}: tools/make_site.py makes a page of it.")
    return re.sub(r"<!--.*?-->", "", found[1]).strip() + "\n"


def anchor(title: str) -> str:
    """What JupyterLab makes of a heading, which the notebooks' links use."""
    return title.replace(" ", "-")


def relink(text: str, folder: str, page: str) -> str:
    """Markdown of a file in that folder of the kit, with its links as they are on that page of the site."""

    def link(match: re.Match) -> str:
        words, address = match[1], match[2]
        if re.match(r"https?:|#", address) and not (folder == "" and address.startswith("#")):
            return match[0]
        file, _, anchor = address.partition("#")
        file = posixpath.normpath(posixpath.join(folder, file)) if file else "README.md"
        if file.endswith(".png"):
            target = file
        elif file == "README.md" and anchor:
            slugs = {re.sub(r"[^\w -]", "", title).strip().replace(" ", "-").lower(): title for title in SECTIONS}
            target = SECTIONS[slugs[anchor]][0] + ".md"
        elif file.endswith(".ipynb"):
            target = file + (f"#{anchor}" if anchor else "")
        elif file in TARGETS:
            target = TARGETS[file]
        else:
            return f"[{words}]({published()}/{file})" if published() else words
        here = target == page  # what the link led to stands below it on the same page
        return words if here else f"[{words}]({posixpath.relpath(target, posixpath.dirname(page) or '.')})"

    return re.sub(r"(?s)\[((?:[^][]|!\[[^]]*\]\([^)]*\))*)\]\(([^)\s]+)\)", link, text)


def facts(content: dict) -> tuple[str, str, str]:
    """A notebook's title, its seconds to run and its minutes to read, from its first cell."""
    first = content["cells"][0]["source"]
    title = re.match(r"# (.+)", first)[1]
    seconds, minutes = re.search(r"Runs in (\d+) s .*? reads in (\d+) minutes", first, re.DOTALL).groups()
    return title, seconds, minutes


def page_of(path: Path) -> dict:
    """The notebook as a page: helpers folded, badges as words, downloads, links to pages."""
    content = load(path)
    title = content["cells"][0]
    hosts = re.findall(r"\[!\[Open in (\w+)\]\([^)]*\)\]\(([^)]+)\)", title["source"])
    title["source"] = re.sub(r"\n\n\[!\[Open in .*", "", title["source"])
    opens = [f'<a href="{link}">{host}</a>' for host, link in hosts]
    files = f'<a href="../files/{path.name}" download>this notebook in one file</a>'
    tasks = f'<a href="../files/{path.stem}_exercises.ipynb" download>with its exercises to solve</a>'
    line = (f"Open in {' · '.join(opens)} · " if opens else "") + f"Download {files} · {tasks}"
    title["source"] = re.sub(r"^(# .*)", lambda match: f"{match[1]}\n\n{line}", title["source"])
    for cell in content["cells"]:
        tags = cell["metadata"].get("tags", [])
        if cell["cell_type"] == "markdown":
            cell["source"] = relink(cell["source"], "notebooks", f"notebooks/{path.name}")
        elif is_setup(cell) or "plt.style.use(" in cell["source"]:
            cell["metadata"]["tags"] = [*tags, "hide-input"]
        elif "exercise-check" in tags:
            cell["metadata"]["tags"] = [*tags, "hide-input"]
            cell["metadata"]["mystnb"] = {"code_prompt_show": "Show the check", "code_prompt_hide": "Hide it"}
        elif "solution" in tags:
            tags.append("hide-cell")
            cell["metadata"]["mystnb"] = {"code_prompt_show": "Show the solution", "code_prompt_hide": "Hide it"}
        cell["metadata"].pop("jupyter", None)
    return content


def messages() -> str:
    """The table of notebook 9, as a page of its own."""
    path = next(path for path in NOTEBOOKS if path.stem.startswith("09"))
    table = next(cell["source"] for cell in load(path)["cells"] if cell["source"].startswith("## Find your message"))
    table = table.replace("](#", f"](notebooks/{path.name}#").replace("## Find your message", "# Find your message")
    return f"""{table}

Each section provokes its message wherever that needs no chip, says what it means, and mends it. In your own program
`explain(exception)` of [`tpu_measure`](api.md#tpu_measure) does the same.
"""


def notebook_link(number: int) -> str:
    return f"([{number}](notebooks/{NOTEBOOKS[number - 1].name}))"


def data_service() -> str:
    """What tools/data_service.py says of itself."""
    text = ast.get_docstring(ast.parse((ROOT / "tools" / "data_service.py").read_text(encoding="utf-8")))
    return f"```text\n{text}\n```"


def write_pages() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "images", PAGES / "images")
    (PAGES / "notebooks").mkdir()
    rows, tree, solve = [], [], []
    for number, path in enumerate(NOTEBOOKS, 1):
        content = page_of(path)
        save(PAGES / "notebooks" / path.name, content)
        title, seconds, minutes = facts(content)
        what = re.search(rf"(?m)^\| \[[^]]*\]\(notebooks/{path.name}\) \| ([^|]+) \|", README)[1]
        rows.append(f"| {number} | [{title}](notebooks/{path.name}) | {what} | {seconds} s | {minutes} min |")
        tree.append(f"{number}. {title.replace('`', '')} <notebooks/{path.stem}>")
        files = f'<a href="files/{path.stem}_exercises.ipynb" download>download</a>'
        tasks = [
            re.match(r"### Exercise \d: (.*)", cell["source"])[1]
            for cell in content["cells"]
            if re.match(r"### Exercise \d: ", cell["source"])
        ]
        solve.append(f"| [{title}](notebooks/{path.name}#Your-turn) | {'; '.join(tasks)} | {files} |")
    repository = published().partition("/blob/")[0]
    given = {
        "count": number_in_words(len(NOTEBOOKS)),
        "jumps": relink(section("I only want …"), "", "index.md").replace(
            "(notebooks/09_when_it_breaks.ipynb#Find-your-message)", "(messages.md)"
        ),
        "notebooks": "| number | notebook | what you can do afterwards | runs in, recorded | reads in |\n"
        "| --- | --- | --- | --- | --- |\n" + "\n".join(rows),
        "open": f"The repository: <{repository}>, to be had with `git clone {repository}`." if repository else "",
        "toctree": "\n".join(tree),
        "files": " ".join(f'<a href="files/{file}" download><code>{file}</code></a>' for file in MODULES),
        "data_service": data_service(),
        "exercises": "| notebook | what they ask | to solve |\n| --- | --- | --- |\n" + "\n".join(solve),
    }
    for page in BOOK.glob("*.md"):
        text = re.sub(r"\{\{ (\w+) \}\}", lambda match: given[match[1]], page.read_text(encoding="utf-8"))
        (PAGES / page.name).write_text(text, encoding="utf-8")
    for heading, (page, title) in SECTIONS.items():
        if page != "index":
            text = relink(section(heading), "", f"{page}.md")
            file = '<a href="files/04_fit.ipynb" download>a standalone notebook</a>'
            text = text.replace("a standalone notebook", file, 1) if page == "platforms" else text
            (PAGES / f"{page}.md").write_text(f"# {title}\n\n{text}", encoding="utf-8")
    text = (PAGES / "cheatsheet.md").read_text(encoding="utf-8")
    text = re.sub(r"\((\d+)\)", lambda match: notebook_link(int(match[1])), text)
    text = text.replace("\n\n## ", "\n\n" + '<a href="files/cheatsheet.pdf">On one page, as PDF</a>\n\n## ', 1)
    (PAGES / "cheatsheet.md").write_text(text, encoding="utf-8")
    (PAGES / "messages.md").write_text(messages(), encoding="utf-8")
    for source, page in (("speed", "speed"), ("compiler", "predictions")):
        text = (ROOT / "benchmarks" / f"{source}.md").read_text(encoding="utf-8")
        text = relink(text, "benchmarks", f"{page}.md")
        before = (PAGES / f"{page}.md").read_text(encoding="utf-8") + "\n" if page == "speed" else ""
        deeper = re.sub(r"(?m)^(#+ )", r"#\1", text) if before else text
        (PAGES / f"{page}.md").write_text(before + deeper, encoding="utf-8")


def number_in_words(number: int) -> str:
    return {11: "eleven", 12: "twelve"}.get(number, str(number))


def write_files() -> None:
    """What the pages offer to take along."""
    shutil.rmtree(FILES, ignore_errors=True)
    (FILES / "files").mkdir(parents=True)
    for path in NOTEBOOKS:
        save(FILES / "files" / path.name, standalone(path))
        save(FILES / "files" / f"{path.stem}_exercises.ipynb", exercises(path))
    for file in MODULES:
        shutil.copy(ROOT / file, FILES / "files")
    sheet.write(BOOK / "cheatsheet.md", FILES / "files" / "cheatsheet.pdf")
    (FILES / ".nojekyll").touch()  # or GitHub Pages would leave out folders that begin with _


def main() -> int:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    write_files()
    write_pages()
    shutil.rmtree(SITE, ignore_errors=True)
    options = ["--fail-on-warning", "--keep-going", "--quiet", "--conf-dir", str(BOOK)]
    failed = sphinx([*options, "-d", str(ROOT / "build" / "book-trees"), str(PAGES), str(SITE)])
    if not failed:
        print(f"The site: {SITE.relative_to(ROOT)}/index.html. To read it: python3 -m http.server -d build/site")
    return failed


if __name__ == "__main__":
    sys.exit(main())

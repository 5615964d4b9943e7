"""Make the notebooks open in one click, or each in one file.

    python tools/publish.py links OWNER/NAME TAG   # what `make publish REPO=OWNER/NAME TAG=…` calls; "" takes them out
    python tools/publish.py standalone             # `make standalone`: notebooks that carry their helpers, in build/
    python tools/publish.py exercises              # `make exercises`: the same without the solutions
    python tools/publish.py kaggle USER NOTEBOOK   # `make kaggle`: one of them with its metadata, ready to push

It stands in a file because badges, links and fingerprints are written from one place, and taken out again. It needs
nothing but Python, so that `make standalone` installs nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
MODULES = {  # that a notebook may import, and the files that each needs
    "tpu_helpers": ["tpu_helpers.py"],
    "tpu_measure": ["tpu_measure.py"],
    "tpu_keep": ["tpu_keep.py"],
    "tpu_compiler": ["tpu_compiler.py", "recorded/predictions.json"],
}
STYLE = "kit.mplstyle"  # that every notebook draws with
PROGRAMS = {"data_service.py": "tools/data_service.py"}  # that a notebook may call by this name
RAW = "https://raw.githubusercontent.com"
BADGES = {  # image and link
    "Colab": (
        "https://colab.research.google.com/assets/colab-badge.svg",
        "https://colab.research.google.com/github/{repo}/blob/{tag}/{path}",
    ),
    "Kaggle": (
        "https://kaggle.com/static/images/open-in-kaggle.svg",
        "https://kaggle.com/kernels/welcome?src=https://github.com/{repo}/blob/{tag}/{path}",
    ),
    "Binder": (
        "https://mybinder.org/badge_logo.svg",
        "https://mybinder.org/v2/gh/{repo}/{tag}?urlpath=lab/tree/{path}",
    ),
}
BEGIN, END = "<!-- make publish writes from here -->", "<!-- to here -->"
COLLAPSED = {  # in JupyterLab, Colab and Kaggle
    "jupyter": {"source_hidden": True},
    "cellView": "form",
    "_kg_hide-input": True,
    "tags": ["hide-input", "helpers"],
}


def badges(repo: str, tag: str, path: str) -> str:
    """Markdown: the three badges that open the file at `path` of that repository at that tag."""
    made = (f"[![Open in {host}]({image})]({link})" for host, (image, link) in BADGES.items())
    return " ".join(made).format(repo=repo, tag=tag, path=path)


def load(path: Path) -> dict:
    """A notebook, with each cell's source as one string."""
    content = json.loads(path.read_text(encoding="utf-8"))
    for cell in content["cells"]:
        cell["source"] = "".join(cell["source"])
    return content


def save(path: Path, content: dict) -> None:
    """As nbformat writes it in `make notebooks`, so that only what was changed differs."""
    cells = [cell | {"source": cell["source"].splitlines(keepends=True)} for cell in content["cells"]]
    text = json.dumps(content | {"cells": cells}, indent=1, ensure_ascii=False, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")


def is_setup(cell: dict) -> bool:
    return "setup" in cell["metadata"].get("tags", [])


def files_of(content: dict) -> list[str]:
    """The kit's files that a notebook needs."""
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code" and not is_setup(cell)]
    code = "\n".join(cell["source"] for cell in cells)
    imported = [files for name, files in MODULES.items() if re.search(rf"(?m)^(from|import) {name}\b", code)]
    programs = [PROGRAMS[name] for name in PROGRAMS if f'"{name}"' in code]
    return [file for files in imported for file in files] + programs + [STYLE]


def code_cell(name: str, source: str, metadata: dict, count: int | None, said: str) -> dict:
    """A cell to put in front, with what it prints."""
    outputs = [{"output_type": "stream", "name": "stdout", "text": [said]}] if said else []
    content = {"cell_type": "code", "execution_count": count, "outputs": outputs}
    return content | {"id": name, "metadata": metadata, "source": source}


def write_links(repo: str, tag: str, raw: str = RAW) -> None:
    """Badges, and where each Setup cell finds the files it needs; none of them if `repo` is empty."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if not re.search(f"{BEGIN}.*{END}", readme, re.DOTALL):
        refuse(f"README.md has no place for the links: put a line {BEGIN} and a line {END} there.")
    source = f"{raw}/{repo}/{tag}" if repo else ""
    rows = []
    for path in NOTEBOOKS:
        content = load(path)
        title = content["cells"][0]
        title["source"] = re.sub(r"\n\n\[!\[Open in .*", "", title["source"])
        if repo:
            line = badges(repo, tag, f"notebooks/{path.name}")
            title["source"] = re.sub(r"^(# .*)", lambda match, line=line: f"{match[1]}\n\n{line}", title["source"])
            rows.append(f"| {path.stem} | {line} |")
        setup = next(filter(is_setup, content["cells"]))
        prints = {file: hashlib.sha256((ROOT / file).read_bytes()).hexdigest() for file in files_of(content) if repo}
        lines = "".join(f'    "{file}": "{prints.get(file, "")}",\n' for file in files_of(content))
        for old, new in ((r"FILES = \{.*?^\}", f"FILES = {{\n{lines}}}"), ('SOURCE = "[^"]*"', f'SOURCE = "{source}"')):
            setup["source"] = re.sub(f"(?ms)^{old}", lambda _, new=new: new, setup["source"])
        save(path, content)
    owner, _, name = repo.partition("/")
    book = f"Read it as a book: <https://{owner.lower()}.github.io/{name}/>"
    block = "\n".join(["", "", book, "", "| open | in |", "| --- | --- |", *rows, "", ""]) if repo else "\n"
    readme = re.sub(f"{BEGIN}.*?{END}", lambda _: BEGIN + block + END, readme, flags=re.DOTALL)
    (ROOT / "README.md").write_text(readme, encoding="utf-8")


def published() -> str:
    """The repository at its tag that the notebooks were stamped with, as a GitHub address; "" if with none."""
    setup = next(filter(is_setup, load(NOTEBOOKS[0])["cells"]))
    found = re.search(r'SOURCE = "https?://[^/]+/([\w.-]+/[\w.-]+)/([^"]+)"', setup["source"])
    return f"https://github.com/{found[1]}/blob/{found[2]}" if found else ""


def standalone(path: Path) -> dict:
    """The notebook with the files it needs in front of its Setup, and no link to a file that is not there."""
    content = load(path)
    cells = content["cells"]
    files = [Path(file) for file in files_of(content)]
    there = published() and rf"[\1]({published()}/notebooks/\2)"
    for cell in cells:
        if cell["cell_type"] == "markdown":
            cell["source"] = re.sub(r"\[([^]]+)\]\((?!https?:)([^)#]+)[^)]*\)", there or r"\1", cell["source"])
        elif cell["execution_count"]:
            cell["execution_count"] += len(files)
    place = next(number for number, cell in enumerate(cells) if is_setup(cell))
    for number, file in enumerate(files):
        source = f"%%writefile {file.name}\n" + (ROOT / file).read_text(encoding="utf-8")
        cell = code_cell(file.stem.replace("_", "-"), source, COLLAPSED, number + 1, f"Writing {file.name}\n")
        cells.insert(place + number, cell)
    return content


def exercises(path: Path) -> dict:
    """The standalone notebook for who wants to solve its exercises: without solutions and outputs."""
    content = standalone(path)
    content["cells"] = [cell for cell in content["cells"] if "solution" not in cell["metadata"].get("tags", [])]
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            cell["execution_count"], cell["outputs"] = None, []
        elif cell["source"].startswith("## Your turn"):
            cell["source"] = re.sub(r" The solution is folded.*", "", cell["source"])
    return content


def write_each(name: str, made, suffix: str = "") -> None:
    """What `made` makes of each notebook, as files in that folder of build/."""
    folder = ROOT / "build" / name
    folder.mkdir(parents=True, exist_ok=True)
    for path in NOTEBOOKS:
        target = folder / f"{path.stem}{suffix}.ipynb"
        save(target, made(path))
        print(target.relative_to(ROOT))


def write_kaggle(user: str, name: str) -> None:
    """A folder for `kaggle kernels push`: a notebook that first installs the TensorFlow that drives Kaggle's TPU."""
    sys.path.insert(0, str(ROOT))
    from tpu_helpers import INSTALL

    folder = ROOT / "build" / "kaggle"
    folder.mkdir(parents=True, exist_ok=True)
    content = standalone(ROOT / "notebooks" / f"{name}.ipynb")
    content["cells"].insert(0, code_cell("install", INSTALL, {}, None, ""))
    save(folder / "notebook.ipynb", content)
    metadata = json.loads((ROOT / "tools" / "kernel-metadata.json").read_text())
    metadata["id"], metadata["title"] = f"{user}/{name.replace('_', '-')}", name.replace("_", " ")
    (folder / "kernel-metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    print(f"{folder.relative_to(ROOT)} is ready:\n")
    print(f"kaggle kernels push -p {folder.relative_to(ROOT)}")
    print(f"kaggle kernels status {metadata['id']}")
    print(f"kaggle kernels output {metadata['id']} -p build/kaggle-output")


def refuse(sentence: str) -> None:
    sys.exit(f"Refused: {sentence}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    links = commands.add_parser("links")
    links.add_argument("repo", help='OWNER/NAME on GitHub; "" takes the links out')
    links.add_argument("tag", nargs="?", default="")
    links.add_argument("--raw", default=RAW, help="where files are fetched from")
    commands.add_parser("standalone")
    commands.add_parser("exercises")
    kaggle = commands.add_parser("kaggle")
    kaggle.add_argument("user")
    kaggle.add_argument("notebook")
    given = parser.parse_args()
    if given.command == "standalone":
        write_each("standalone", standalone)
    elif given.command == "exercises":
        write_each("exercises", exercises, "_exercises")
    elif given.command == "kaggle":
        if not re.fullmatch(r"[\w-]+", given.user):
            refuse(f"KAGGLE_USER={given.user!r} is no name: pass the one in your profile's address.")
        if given.notebook not in (known := [path.stem for path in NOTEBOOKS]):
            refuse(f"NOTEBOOK={given.notebook!r} is unknown: pass one of {', '.join(known)}.")
        write_kaggle(given.user, given.notebook)
    else:
        if given.repo and not re.fullmatch(r"[\w-]+/(?!\.+$)[\w.-]+(?<!\.git)", given.repo):
            refuse(f"REPO={given.repo!r} is no repository: pass OWNER/NAME, as in REPO=ada/tpu-kit.")
        if given.repo and not re.fullmatch(r"\w([\w./-]*[\w-])?", given.tag):
            refuse(f"TAG={given.tag!r} is no tag: pass the one that you are about to set, as in TAG=v1.0.0.")
        write_links(given.repo, given.tag, given.raw)
        print(f"published as {given.repo} at {given.tag}: commit, tag, push." if given.repo else "links taken out.")


if __name__ == "__main__":
    main()

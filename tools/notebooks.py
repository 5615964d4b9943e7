"""Execute the notebooks: `run` into build/ with papermill, or `regenerate` the outputs that are committed.

    python tools/notebooks.py run [NOTEBOOK ...]          # what `make run` calls
    python tools/notebooks.py regenerate [NOTEBOOK ...]   # what `make notebooks` calls

It stands in a file because a Makefile can neither draw a progress bar nor say at the end what became of each notebook.
"""

from __future__ import annotations

import argparse
import base64
import functools
import math
import os
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import nbformat
import papermill
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from tqdm import tqdm  # papermill brings it
from traitlets.config import Config

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 600  # seconds for one cell
TOGETHER = ("01", "03", "07", "08", "09", "11")  # not about this machine's speed: `run` has two of them at a time
RECORDS = ROOT / "recorded" / "predictions.json"  # of the TPU compiler, for machines where it cannot be asked
BAR = "{{desc:26}} {{bar:30}} {{n_fmt}}/{{total_fmt}} {} {{elapsed}}"
CONFIG = Config(KernelManager={"transport_encryption": "auto"})  # or each kernel warns that it is not encrypted


def run(notebook: Path, bar: bool = True) -> Path:
    """Execute with papermill, from the repository's folder, into build/; raise where a cell does."""
    result = ROOT / "build" / notebook.name
    result.parent.mkdir(exist_ok=True)
    papermill.execute_notebook(
        notebook,
        result,
        cwd=ROOT,
        kernel_name="python3",
        execution_timeout=TIMEOUT,
        config=CONFIG,
        request_save_on_cell_execute=False,  # at the end, or writing takes a second or two of each notebook
        progress_bar={"desc": notebook.stem, "bar_format": BAR.format("cells")} if bar else False,
    )
    return result


def told(action, notebook: Path) -> tuple[Path, float, str, str]:
    """The notebook, the seconds that the action took, whether it went well, and where the result is, or why not."""
    began = time.perf_counter()
    try:
        where = str(action(notebook.resolve()).relative_to(ROOT))
        return notebook, time.perf_counter() - began, "ok", where
    except (papermill.exceptions.PapermillException, CellExecutionError, OSError) as error:
        return notebook, time.perf_counter() - began, "FAILED", first_line(error)


def regenerate(notebook: Path) -> Path:
    """Execute in the notebook's own folder and store what a reader would see; raise, and store nothing, on an error."""
    content = nbformat.read(notebook, as_version=4)
    began = time.perf_counter()
    os.environ["TPU_COMPILER_RECORD"] = str(RECORDS)
    NotebookClient(
        content,
        timeout=None,  # with no records to show, the TPU compiler works for half an hour
        kernel_name="python3",
        config=CONFIG,
        record_timing=False,
        coalesce_streams=True,  # progress bars as they end, not each of their states
    ).execute(cwd=str(notebook.parent))
    say_how_long(content, time.perf_counter() - began)
    for cell in content.cells:
        if "readme_picture" in cell.metadata:
            store_picture(cell, ROOT / "images" / cell.metadata["readme_picture"])
    content.metadata.pop("papermill", None)
    content.metadata["language_info"] = {"name": "python"}
    nbformat.write(content, notebook)
    return notebook


def say_how_long(content: nbformat.NotebookNode, seconds: float) -> None:
    """In the first cell: the time of this run, recorded, and of reading, at 200 words of prose a minute."""
    prose = " ".join(cell.source for cell in content.cells if cell.cell_type == "markdown")
    minutes = math.ceil(len(re.findall(r"\w+", prose)) / 200)
    where = f"{os.cpu_count()} CPU cores, {time.strftime('%B %Y')}"
    line = f"Runs in {seconds:.0f} s (recorded: {where}), reads in {minutes} minutes."
    first, found = re.subn(r"Runs in .*? reads in \d+ minutes\.", line, content.cells[0].source, flags=re.DOTALL)
    if not found:
        raise OSError("its first cell does not say 'Runs in 0 s (recorded: …), reads in 0 minutes.'")
    content.cells[0].source = first


def store_picture(cell: nbformat.NotebookNode, path: Path) -> None:
    """The cell's picture as a file, for the README."""
    data = next(output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {}))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(base64.b64decode(data))


def first_line(error: Exception) -> str:
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().splitlines()
    named = [line for line in lines if re.match(r"\w*(Error|Refused|Exception|Interrupt)\b", line)]
    return (named or lines or [type(error).__name__])[-1].rstrip(": ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("run", "regenerate"))
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all in notebooks/")
    arguments = parser.parse_args()
    notebooks = arguments.notebooks or sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    action, beside = regenerate, []
    if arguments.action == "run":
        action, beside = run, [notebook for notebook in notebooks[::-1] if notebook.name.startswith(TOGETHER)]
    with ProcessPoolExecutor(2) as pool:  # the later ones first: they take longer
        each = [pool.submit(told, functools.partial(run, bar=False), notebook) for notebook in beside]
        bar = {"desc": "two at a time", "bar_format": BAR.format("notebooks"), "disable": not beside}
        done = [future.result() for future in tqdm(as_completed(each), total=len(each), **bar)]
    done += [told(action, notebook) for notebook in notebooks if notebook not in beside]
    print()
    for notebook, seconds, result, where in sorted(done):
        print(f"{notebook.stem:26} {seconds:6.1f} s   {result:6}   {where}")
    return int(any(result != "ok" for _, _, result, _ in done))


if __name__ == "__main__":
    sys.exit(main())

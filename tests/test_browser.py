"""Each notebook in a real browser, JupyterLab in headless Chromium, Run All Cells: `make test-browser`."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import nbformat
import pytest
from conftest import NOTEBOOKS, PICTURES, ROOT

pytestmark = pytest.mark.browser
PATIENCE = 180  # seconds for one notebook


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """JupyterLab over a copy of the kit, so that nothing here is saved over; its address."""
    kit = tmp_path_factory.mktemp("kit")
    shutil.copytree(ROOT / "notebooks", kit / "notebooks", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    shutil.copytree(ROOT / "recorded", kit / "recorded")
    shutil.copytree(ROOT / "tools", kit / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("tpu_helpers.py", "tpu_measure.py", "tpu_keep.py", "tpu_compiler.py", "kit.mplstyle"):
        shutil.copy(ROOT / file, kit)
    settings = {
        "notebook-extension/tracker": {"windowingMode": "none"},  # every cell is on the page, also those out of sight
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    }
    for name, values in settings.items():
        path = kit / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(values))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [f"--ServerApp.root_dir={kit}", f"--LabApp.user_settings_dir={kit / 'settings'}", "--no-browser"]
    arguments += [f"--port={port}", "--ip=127.0.0.1", "--IdentityProvider.token=", "--allow-root"]
    arguments += ["--KernelManager.transport_encryption=auto"]
    inherited = {name: value for name, value in os.environ.items() if name not in ("TF_USE_LEGACY_KERAS", "MPLBACKEND")}
    with (
        open(kit / "log", "w") as log,
        subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *arguments], stdout=log, stderr=log, env=inherited
        ) as server,
    ):
        address = f"http://127.0.0.1:{port}"
        for _ in range(120):
            try:
                urllib.request.urlopen(f"{address}/api", timeout=1)
                break
            except OSError:
                assert server.poll() is None, (kit / "log").read_text()
                time.sleep(0.5)
        yield address
        server.terminate()


def choose(page, menu, item):
    page.locator(".lm-MenuBar-item", has_text=menu).click()
    page.locator(".lm-Menu-item", has_text=item).first.click()


def wait_until_run(page, cells):
    """Every prompt has its number, and the kernel has nothing more to do."""
    expected = [f"[{number}]:" for number in range(1, cells + 1)]
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        prompts = [text for text in page.locator(".jp-CodeCell .jp-InputPrompt").all_inner_texts() if text != "[ ]:"]
        errors = page.locator("[data-mime-type='application/vnd.jupyter.error']").all_inner_texts()
        if prompts == expected or errors:
            break
        page.wait_for_timeout(500)
    return prompts == expected, errors


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_run_all_cells(notebook, lab, chromium):
    stored = nbformat.read(notebook, as_version=4)
    code = [cell for cell in stored.cells if cell.cell_type == "code"]
    pictures = sum("image/png" in output.get("data", {}) for cell in code for output in cell.outputs)
    page = chromium.new_page(viewport={"width": 1300, "height": 1000})
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(f"{lab}/lab?reset", wait_until="domcontentloaded")
    page.locator(".jp-DirListing-item", has_text="notebooks").dblclick(timeout=60_000)
    page.locator(".jp-DirListing-item", has_text=notebook.name).dblclick()
    page.locator(".jp-NotebookPanel .jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for(timeout=60_000)
    choose(page, "Edit", "Clear Outputs of All Cells")
    for folded in ("Code", "Outputs"):  # of checks and solutions
        choose(page, "View", f"Expand All {folded}")
    for _ in range(3):  # while the page is still being put together, a click may come to nothing
        choose(page, "Run", "Run All Cells")
        page.wait_for_timeout(3000)
        if "".join(page.locator(".jp-CodeCell .jp-InputPrompt").all_inner_texts()).replace("[ ]:", ""):
            break
    complete, errors = wait_until_run(page, len(code))
    assert not errors
    assert complete, f"not all cells were run within {PATIENCE} s"
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for(timeout=30_000)
    assert page.locator("[data-mime-type='application/vnd.jupyter.stderr']").all_inner_texts() == []
    images = page.locator(".jp-OutputArea-output img")
    assert images.count() == pictures
    assert images.evaluate_all("all => all.every(image => image.complete && image.naturalWidth > 50)")
    assert not problems
    heights = page.locator(".jp-NotebookPanel *").evaluate_all("all => all.map(element => element.scrollHeight)")
    page.set_viewport_size({"width": 1300, "height": min(16_000, max(heights) + 200)})
    page.locator(".jp-NotebookPanel *").evaluate_all("all => all.forEach(element => element.scrollTop = 0)")
    page.wait_for_timeout(1000)
    page.screenshot(path=PICTURES / f"{notebook.stem}.png")
    page.close()

"""Order and grouping of the suite, and TensorFlow imported as the notebooks import it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

ENVIRONMENT = dict(os.environ)  # before TensorFlow and JAX write their own variables into it

import tpu_helpers  # noqa: E402

os.environ.setdefault("MPLBACKEND", "Agg")
ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "build" / "browser"  # where the tests in a browser leave them
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))


LONGEST = "test_a_training_killed_25_times_is_one_that_nobody_killed"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest starts first, so that both workers finish together."""
    items.sort(key=lambda item: (item.name != LONGEST, item.path.stem != "test_notebooks"))


@pytest.fixture(scope="session")
def tf():
    """TensorFlow, with its CPU divided as `connect` does it, before anything else has run."""
    with tpu_helpers.quietly():
        import tensorflow

        tpu_helpers.virtual_strategy(2)
    return tensorflow


@pytest.fixture(scope="module")
def chromium():
    """A headless browser."""
    playwright = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not program:
        pytest.exit("Chromium is not installed: run `apt-get install chromium`, then the same again.", 1)
    options = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
    PICTURES.mkdir(parents=True, exist_ok=True)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=program, args=[*options, "--disable-component-update", "--disable-sync"]
        )
        yield browser
        browser.close()

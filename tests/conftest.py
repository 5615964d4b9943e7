"""Order and grouping of the suite, and TensorFlow imported as the notebooks import it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import tpu_helpers

os.environ.setdefault("MPLBACKEND", "Agg")
ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A notebook's cells under nbval share one kernel, so one worker; and what takes longest starts first."""
    for item in items:
        if item.path.suffix == ".ipynb":
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    items.sort(key=lambda item: 0 if item.path.suffix == ".ipynb" else 1 if item.path.stem == "test_notebooks" else 2)


@pytest.fixture(scope="session")
def tf():
    """TensorFlow, with its CPU divided as `connect` does it, before anything else has run."""
    with tpu_helpers.quietly():
        import tensorflow

        tpu_helpers.virtual_strategy(2)
    return tensorflow

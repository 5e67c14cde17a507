"""What holds for every test."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

# Two threads add up in another order than one: bits are compared with one.
torch.set_num_threads(1)

# A busy machine is no failure: tests have a timeout of their own.
settings.register_profile("podium", deadline=None, print_blob=True)
settings.load_profile("podium")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # whoever hands tests out looks at the marks next
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What tests run side by side: those of one file stay together, and those that look at the whole machine, too."""
    for item in items:
        folder = item.path.parent.name
        whole = folder in ("integration", "cluster", "bench") or item.path.name == "test_doctor.py"
        group = "machine" if whole else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))

"""Everything here runs on an NVIDIA GPU: ``pytest -m cuda``."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fxfuse.ops.gpu.driver import Launcher


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.cuda)
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launcher]:
    """The kernels of our own that were launched."""
    launched: list[Launcher] = []
    launch = Launcher.launch

    def noted(launcher: Launcher, blocks: int, stream: int) -> None:
        launched.append(launcher)
        launch(launcher, blocks, stream)

    monkeypatch.setattr(Launcher, "launch", noted)
    return launched

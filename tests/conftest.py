"""Fixtures of all tests: fixed seeds and environment, a cache of their own, and settings of torch that are restored."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("lipflow", deadline=None, derandomize=True)  # machines may be busy
settings.load_profile("lipflow")


@pytest.fixture(scope="session", autouse=True)
def user_cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("cache") / "lipflow"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lipflow.data.downloads.user_cache_dir", lambda: folder)
        yield


@pytest.fixture(autouse=True)
def same_everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    for name in ("COLUMNS", "FORCE_COLOR", "LIPFLOW_DEBUG", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)
    torch.set_flush_denormal(False)

"""Fixtures of all tests: fixed seeds and environment, a cache of their own, and settings of torch that are restored."""

import os
from collections.abc import Iterator

# One thread per process, set before torch is imported: with more threads than cores, all are several times slower.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

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

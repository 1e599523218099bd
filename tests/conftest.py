"""What holds for all tests: what they keep in the user's cache, they keep elsewhere."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("cache") / "lipflow"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lipflow.data.network.own_cache", lambda: folder)
        yield

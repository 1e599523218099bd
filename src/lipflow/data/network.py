"""Where downloads live, and the one function that uses the network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lipflow.data.dataset import DataError
from lipflow.files import permit

_REASONS = {  # where requests' own words are a page long
    "ConnectionError": "no connection",
    "ProxyError": "no connection through the proxy",
    "ConnectTimeout": "the server did not answer",
    "ReadTimeout": "the server stopped answering",
}


def cache_dir() -> Path:
    """The folder for downloads: $LIPFLOW_DATA if set, else the user's cache (~/.cache/lipflow on Linux)."""
    if chosen := os.environ.get("LIPFLOW_DATA"):
        return Path(chosen).expanduser()
    return own_cache()


def own_cache() -> Path:
    """The user's cache (~/.cache/lipflow on Linux), where nobody else writes."""
    return Path(_pooch().os_cache("lipflow"))


def download(title: str, url: str, sha256: str, folder: Path) -> Path:
    """Fetch `url` into `folder`, check its SHA-256 and return its path; a file already there and right is kept.

    pooch writes to a temporary file first, so an interrupted download leaves nothing that looks complete.
    """
    pooch = _pooch()
    name = url.rsplit("/", 1)[-1]
    bar = _terminal_bar(name)
    downloader = pooch.HTTPDownloader(progressbar=bar, chunk_size=1 << 18)
    try:
        path = Path(pooch.retrieve(url, f"sha256:{sha256}", fname=name, path=folder, downloader=downloader))
        permit(path)
        return path
    except (OSError, ValueError) as error:  # no network (requests' errors are OSErrors), no disk, or a wrong hash
        reason = _REASONS.get(type(error).__name__) or " ".join(str(error).split())[:200]
        raise DataError(
            f"could not download {title} from {url} into {folder} ({reason}); "
            f"get {name} on another machine, put it in a folder and pass --data-dir FOLDER"
        ) from None
    finally:
        if bar:
            bar.close()


def _pooch() -> Any:
    try:
        import pooch
    except ImportError:
        raise DataError("downloading needs pooch: pip install pooch, or pass --data-dir FOLDER with the data") from None
    return pooch


def _terminal_bar(name: str) -> _Bar | None:
    try:
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
    except ImportError:
        return None
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    progress = Progress(*columns)
    return _Bar(progress, name) if progress.console.is_terminal else None


class _Bar:
    """rich's progress bar with the four members of tqdm that pooch calls."""

    def __init__(self, progress: Any, name: str) -> None:
        self._progress, self._task = progress, progress.add_task(name, total=None)

    @property
    def total(self) -> float | None:
        return self._progress.tasks[self._task].total

    @total.setter
    def total(self, size: float) -> None:
        self._progress.update(self._task, total=size)
        self._progress.start()

    def update(self, size: float) -> None:
        self._progress.advance(self._task, size)

    def reset(self) -> None:
        self._progress.reset(self._task)

    def close(self) -> None:
        self._progress.stop()

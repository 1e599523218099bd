"""The folder of downloads, and the only function that uses the network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lipflow.data.dataset import DataError
from lipflow.files import apply_umask

_REASONS = {  # short messages for errors of requests that have very long ones
    "ConnectionError": "no connection",
    "ProxyError": "no connection through the proxy",
    "ConnectTimeout": "the server did not answer",
    "ReadTimeout": "the server stopped answering",
}


def cache_dir() -> Path:
    """The folder for downloads: $LIPFLOW_DATA if set, else the user's cache (~/.cache/lipflow on Linux)."""
    if chosen := os.environ.get("LIPFLOW_DATA"):
        return Path(chosen).expanduser()
    return user_cache_dir()


def user_cache_dir() -> Path:
    """The user's cache (~/.cache/lipflow on Linux), to which other users cannot write."""
    import pooch

    return Path(pooch.os_cache("lipflow"))


def download(title: str, url: str, sha256: str, folder: Path) -> Path:
    """Download `url` into `folder` unless the file is there, check its SHA-256, and return its path.

    pooch writes to a temporary file first, so that an interrupted download leaves no partial file.
    """
    import pooch

    name = url.rsplit("/", 1)[-1]
    bar: Any = _Bar(name)  # pooch declares a bool
    downloader: Any = pooch.HTTPDownloader(progressbar=bar, chunk_size=1 << 18)
    try:
        path = Path(pooch.retrieve(url, f"sha256:{sha256}", fname=name, path=folder, downloader=downloader))
        apply_umask(path)
        return path
    except (OSError, ValueError) as error:  # an error of requests or of the disk, or a wrong hash
        reason = _REASONS.get(type(error).__name__) or " ".join(str(error).split())[:200]
        raise DataError(
            f"could not download {title} from {url} into {folder} ({reason}); "
            f"get {name} on another machine, put it in a folder and pass --data-dir FOLDER"
        ) from None
    finally:
        bar.close()


class _Bar:
    """A progress bar of rich with the members of tqdm that pooch uses."""

    total: float  # set by pooch

    def __init__(self, name: str) -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns)
        self._progress.disable = not self._progress.console.is_terminal
        self._task = self._progress.add_task(name, total=None)

    def update(self, size: float) -> None:
        self._progress.start()
        self._progress.update(self._task, total=self.total, advance=size)

    def reset(self) -> None:
        self._progress.reset(self._task)

    def close(self) -> None:
        if not self._progress.disable:
            self._progress.stop()

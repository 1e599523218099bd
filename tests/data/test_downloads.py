"""Downloads, from a local server."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from lipflow.data import DataError, cifar, fetch, load
from lipflow.data.downloads import cache_dir, download
from tests.server import serve

CONTENT = b"some bytes" * 100_000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server(tmp_path):
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "data.bin").write_bytes(CONTENT)
    with serve(folder) as url:
        yield url


def test_download_fetches_a_file_once(server, tmp_path):
    cache = tmp_path / "new" / "cache"
    path = download("it", f"{server}/data.bin", SHA256, cache)
    assert path == cache / "data.bin"
    assert path.read_bytes() == CONTENT
    (tmp_path / "plain").touch()  # with the permissions of the umask
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    path.write_bytes(CONTENT[:-1])  # damaged, so fetched again
    assert download("it", f"{server}/data.bin", SHA256, cache).read_bytes() == CONTENT
    (tmp_path / "served" / "data.bin").unlink()
    assert download("it", f"{server}/data.bin", SHA256, cache) == path


@pytest.mark.parametrize(
    ("file", "sha256", "words"),
    [
        ("data.bin", "0" * 64, "could not download it .* hash .* --data-dir"),
        ("other.bin", SHA256, "404.* get other.bin on another machine"),
    ],
    ids=["wrong hash", "not found"],
)
def test_download_that_fails_raises_one_line_and_leaves_no_file(server, tmp_path, file, sha256, words):
    with pytest.raises(DataError, match=rf"^.*{words}.*\Z"):
        download("it", f"{server}/{file}", sha256, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_load_without_a_network_raises_one_line(tmp_path, monkeypatch):
    """Nothing listens on port 9; without data_dir, load tries to download."""
    monkeypatch.setenv("LIPFLOW_DATA", str(tmp_path))
    offline = replace(cifar.CIFAR10, url="http://127.0.0.1:9/cifar-10-binary.tar.gz")
    with pytest.raises(DataError, match=r"^.*CIFAR-10 .*\(no connection\); get .* on another machine.*\Z"):
        cifar.load(offline, cifar.Request())


def test_fetch_downloads_into_the_requested_folder_and_load_does_not(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(cifar, "download", lambda *arguments: asked.append(arguments) or Path("here"))
    with pytest.raises(DataError, match="no CIFAR-10 in"):
        load("cifar10", tmp_path)
    assert fetch("cifar100", tmp_path) == Path("here")
    assert asked == [("CIFAR-100", cifar.CIFAR100.url, cifar.CIFAR100.archive_sha256, tmp_path)]


@pytest.mark.parametrize("name", ["digits", "folder", "nothing"])
def test_fetch_rejects_datasets_without_a_download(name):
    with pytest.raises(DataError, match=f"'{name}' cannot be downloaded; only cifar10, cifar100"):
        fetch(name)


def test_cache_dir_follows_the_environment(tmp_path, monkeypatch):
    for value, folder in ((str(tmp_path), tmp_path), ("~/somewhere", Path.home() / "somewhere")):
        monkeypatch.setenv("LIPFLOW_DATA", value)
        assert cache_dir() == folder
    monkeypatch.delenv("LIPFLOW_DATA")
    assert cache_dir().name == "lipflow"


def test_download_shows_a_full_bar_in_a_terminal(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    download("it", f"{server}/data.bin", SHA256, tmp_path)
    shown = capsys.readouterr().out
    assert "data.bin" in shown
    assert "1.0/1.0 MB" in shown

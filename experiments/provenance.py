"""The provenance of results: commit, versions and machine of the runs and of the command; and their certificates."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lipflow.files import write_text

if TYPE_CHECKING:
    from lipflow.certificate import CertificateFile


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON; create the folder if necessary."""
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)


def provenance(command: str) -> dict[str, Any]:
    """The provenance of a result that is written now: commit, versions, machine, command and day."""
    from lipflow.train.distributed import join
    from lipflow.train.record import environment

    with join("auto") as ranks:
        known = environment(ranks)
    versions = {name: known[name] for name in ("lipflow", "torch", "python")}
    cores = known["cores"] or 1
    machine = {1: "one core", 2: "two cores"}.get(cores, f"{cores} cores") + f" ({known['processor']})"
    device = "" if known["device"] == "cpu" else f", {known['device']}"
    day = time.strftime("%Y-%m-%d", time.gmtime())
    return {"commit": known["commit"], **versions, "machine": machine + device, "command": command, "day": day}


def certificate_of_test_images(folder: Path, images: int, certify: Callable[[], object]) -> "CertificateFile":
    """The certificate of this number of test images by the final network of a run.

    `certify` makes it if the folder has none, or one of other images or of the best network.
    """
    from lipflow.report.run_results import read

    found = read(folder, folder.name).certificate
    if found is None or (found.split, len(found.truth)) != ("test", images) or found.network == "best":
        certify()
        found = read(folder, folder.name).certificate
    assert found is not None
    return found


def origin(runs: Sequence[Mapping[str, Any]]) -> str:
    """The environments that runs have recorded, as text: each commit, version, processor and number of threads once."""
    recorded = [run["recorded"] for run in runs if "recorded" in run]
    if not recorded:
        return ""

    def each(key: str) -> list[Any]:
        return list(dict.fromkeys(known[key] for known in recorded if known.get(key) is not None))

    commits = ", ".join(short(commit) for commit in each("commit"))
    threads = " or ".join(f"{number} thread{'s' * (number > 1)}" for number in sorted(each("threads")))
    versions = ", ".join(f"{name} {version}" for name in ("lipflow", "torch") for version in each(name))
    where = f" on {' and '.join(each('processor'))}" if each("processor") else ""
    return f"trained at commit {commits}, {versions}, with {threads} a run{where}"


def short(commit: str | None) -> str:
    """Twelve digits of a commit, with -dirty if the tree had changes."""
    return f"{str(commit)[:12]}{'-dirty' if str(commit).endswith('-dirty') else ''}"

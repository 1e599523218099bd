"""The figures, for runs in any state."""

import json

import pytest

from lipflow.report import figure
from lipflow.report.run_results import read
from lipflow.report.table import summarise


def test_save_draws_what_the_runs_have_data_for(run, tmp_path):
    pytest.importorskip("matplotlib")
    whole = read(run, "_a$b$")
    (run / "certificate.json").unlink()
    runs = [whole, read(run, "only trained")]
    files = figure.save(runs, summarise(runs), tmp_path / "new" / "folder")
    assert sorted(f.stem for f in files) == [name for name in ("accuracy", "radii", "training") for _ in "ab"]
    for file in files:
        assert file.read_bytes().startswith({".png": b"\x89PNG", ".pdf": b"%PDF"}[file.suffix])
    (run / "log.jsonl").unlink()
    bare = [read(run, "nothing")]
    assert figure.save(bare, summarise(bare), tmp_path) == []


def test_accuracy_is_exact_and_its_labels_say_what_is_drawn(run):
    """An attack on some images says on which; the paper is drawn once, in grey."""
    pytest.importorskip("matplotlib")
    record = json.loads((run / "run.json").read_text())
    record["run"] |= {"model": "cpl-s", "data": "cifar10", "model_args": {}}
    (run / "run.json").write_text(json.dumps(record))
    runs = [read(run, "one"), read(run, "two")]
    held, drawn = runs[0].certificate, figure.accuracy(runs, summarise(runs))
    assert held is not None
    assert drawn is not None
    lines = {line.get_label(): line for line in drawn.axes[0].lines}
    paper = "the paper's CPL-S on cifar10, certified"
    kinds = ("certified", "under attack, first 40 images")
    assert list(lines) == [*(f"{name}, {kind}" for name in ("one", "two") for kind in kinds), paper]
    assert lines[paper].get_color() == figure.GREY not in figure.COLOURS
    x, y = lines["one, certified"].get_data()
    for eps in (0.05, 0.1, 0.3):
        assert y[x <= eps][-1] == pytest.approx(100 * (held.right & (held.radius > eps)).mean())
    assert y[0] == pytest.approx(100 * held.right.mean())

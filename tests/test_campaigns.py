"""The page of the campaigns is up to date, and the campaigns found no violation."""

import json

import pytest

from tests import campaigns

PAGE, ROWS = (campaigns.ROOT / "docs" / name for name in (campaigns.PAGE, campaigns.ROWS))


@pytest.fixture
def rows():
    return json.loads(ROWS.read_text())


def test_page_is_made_from_the_rows(rows):
    assert PAGE.read_text() == campaigns.page(rows), "run `python tests/campaigns.py`"


def test_rows_have_no_violation_and_controls_succeed(rows):
    assert {row["violations"] for row in rows.values()} == {0}
    rounding, attacked, auto = (
        rows[name]["numbers"]
        for name in ("rounding at the boundary", "PGD inside of the radius", "AutoAttack inside of the radius")
    )
    assert rounding["pairs"] >= 1000
    assert min(rounding["control_violations"].values()) > 0
    assert attacked["images"] == 300  # every test image
    assert attacked["attacks"] >= 10 * attacked["images"]
    assert auto["images"] == 500
    assert min(attacked["control_fallen"], auto["control_fallen"]) > 0


def test_rows_have_sources(rows):
    for row in rows.values():
        assert set(row["source"]) == {"command", "seconds", "date", "machine", "commit", "versions"}
        assert {"lipflow", "python", "torch", "numpy"} <= set(row["source"]["versions"])


def test_write_replaces_the_row_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.setenv("LIPFLOW_CAMPAIGNS", str(tmp_path))
    for violations in (3, 0):
        campaigns.write("a", "test_a", 1.4, done="much", violations=violations, control="falls", images=7)
    campaigns.write("b", "test_b", 1.4, done="more", violations=0, control="falls")
    found = json.loads((tmp_path / campaigns.ROWS).read_text())
    assert {name: row["violations"] for name, row in found.items()} == {"a": 0, "b": 0}
    assert found["a"]["numbers"] == {"images": 7}
    assert (tmp_path / campaigns.PAGE).read_text() == campaigns.page(found)

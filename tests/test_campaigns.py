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


def test_rows_have_no_violation(rows):
    campaign_names = "AutoAttack inside of the radius", "PGD inside of the radius", "rounding at the boundary"
    assert {name: row["violations"] for name, row in rows.items()} == dict.fromkeys(campaign_names, 0)


def test_rows_have_sources(rows):
    for row in rows.values():
        assert set(row["source"]) == {"command", "seconds", "date", "machine", "commit", "versions"}
        assert {"lipflow", "python", "torch", "numpy"} <= set(row["source"]["versions"])


def test_write_replaces_the_row_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.setenv("LIPFLOW_CAMPAIGNS", str(tmp_path))
    for violations in (3, 0):
        campaigns.write("a", "test_a", 1.4, done="much", violations=violations, control="falls")
    campaigns.write("b", "test_b", 1.4, done="more", violations=0, control="falls")
    found = json.loads((tmp_path / campaigns.ROWS).read_text())
    assert {name: row["violations"] for name, row in found.items()} == {"a": 0, "b": 0}
    assert (tmp_path / campaigns.PAGE).read_text() == campaigns.page(found)

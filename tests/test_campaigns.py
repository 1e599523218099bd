"""The page of the campaigns is up to date, and the campaigns found no violation."""

import json

from tests import campaigns

PAGE, ROWS = (campaigns.ROOT / "docs" / name for name in (campaigns.PAGE, campaigns.ROWS))


def test_the_page_is_made_from_rows_without_a_violation():
    rows = json.loads(ROWS.read_text())
    assert PAGE.read_text() == campaigns.page(rows), "run `python tests/campaigns.py`"
    attacks = "AutoAttack inside of the radius", "PGD inside of the radius", "certificates of all kinds"
    campaign_names = *attacks, "exact arithmetic", "rounding at the boundary"
    assert {name: row["violations"] for name, row in rows.items()} == dict.fromkeys(campaign_names, 0)


def test_write_replaces_the_row_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.setenv("LIPFLOW_CAMPAIGNS", str(tmp_path))
    for violations in (3, 0):
        campaigns.write("a", "test_a", 1.4, done="much", violations=violations, control="falls")
    campaigns.write("b", "test_b", 1.4, done="more", violations=0, control="falls")
    found = json.loads((tmp_path / campaigns.ROWS).read_text())
    assert {name: row["violations"] for name, row in found.items()} == {"a": 0, "b": 0}
    assert (tmp_path / campaigns.PAGE).read_text() == campaigns.page(found)

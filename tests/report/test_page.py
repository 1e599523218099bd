"""The page as a file: self-contained, reproducible, and safe with the run of a stranger."""

import base64
import hashlib
import json
import re
from dataclasses import replace

import pytest

from lipflow.report.page import embed, page
from lipflow.report.run_results import read
from lipflow.report.table import summarise
from tests.elements import Elements
from tests.report.conftest import change_claims, change_json

EVIL = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{script}}<!--"


def render(*runs):
    return page(list(runs), summarise(list(runs)))


def elements_of(text: str) -> Elements:
    return Elements(text, "script", "style")


def test_the_page_requests_nothing_and_is_reproducible(original):
    text = render(read(original, "tiny"))
    assert text == render(read(original, "tiny"))
    elements = elements_of(text)
    for tag, attributes in elements.found:
        assert tag not in ("iframe", "object", "embed", "base", "form")
        for name, value in attributes.items():
            assert not name.startswith("on")
            assert name != "style"
            assert name not in ("src", "href") or value.startswith(("data:", "#"))
    text = "".join(elements.text["script"] + elements.text["style"])
    assert "@import" not in text
    assert "url(" not in text
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}  # a name, never fetched


def test_embed_is_safe_in_a_script_element():
    embedded = embed({"a": "</script><!--&\u2028é"})
    assert not set("<>&\u2028é") & set(embedded)
    assert json.loads(embedded) == {"a": "</script><!--&\u2028é"}
    with pytest.raises(ValueError, match="JSON"):
        embed(float("nan"))


def test_the_policy_allows_only_our_script_and_style(original):
    text = render(read(original, "tiny"))
    elements = elements_of(text)
    policy = next(a["content"] for tag, a in elements.found if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    for name, part in (("script", elements.text["script"][-1]), ("style", elements.text["style"][0])):
        hashed = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{hashed}'" in policy


def test_strings_of_a_run_add_no_element_and_no_attribute(run):
    primitives = json.loads((run / "certificate.json").read_text())["primitives"]
    plain = elements_of(render(read(run, "tiny"), read(run, "other")))
    change_claims(run, primitives=[{**p, "kind": EVIL, "shape": EVIL, "how": EVIL} for p in primitives])
    record = json.loads((run / "run.json").read_text())["run"]
    change_json(run / "run.json", run={**record, "model": EVIL, "data": EVIL})
    change_json(run / "attack.json", certificate=json.loads((run / "certificate.json").read_text())["digest"])
    runs = [replace(read(run, name), folder=run / "<b>" / EVIL) for name in (EVIL, EVIL * 2)]
    elements = elements_of(render(*runs))
    assert [tag for tag, _ in elements.found] == [tag for tag, _ in plain.found]
    assert [sorted(a) for _, a in elements.found] == [sorted(a) for _, a in plain.found]
    assert elements.text["script"][-1] == plain.text["script"][-1]
    assert json.loads(elements.text["script"][0])["runs"][0]["name"] == EVIL


def test_the_page_shows_runs_in_any_state(run):
    whole = read(run, "whole")
    (run / "attack.json").unlink()
    certified = read(run, "certified")
    (run / "certificate.json").unlink()
    (run / "model.safetensors").unlink()
    trained = read(run, "trained")
    (run / "log.jsonl").unlink()
    begun = read(run, "begun")
    text = render(whole, certified, trained, begun)
    assert text.count("nothing certified yet") == 2
    for missing in ("no certificate yet: lipflow", "training has not ended", "not attacked yet: lipflow"):
        assert missing in text
    assert "Consistent as far as compared." in text
    assert "certified (not attacked); trained (no certificate); begun (no certificate)" in text
    assert "<b>Nothing was compared</b>: certified (not attacked)." in render(certified)
    alone = render(whole)
    assert "<b>Consistent.</b>" in alone
    assert "Not compared" not in alone
    alone = render(begun)
    for section in ("curves", "radii", "training", "gallery", "ledger"):
        assert f'id="{section}"' not in alone
        assert f'href="#{section}"' not in alone

"""Every mutant of tests/mutants.py fails some test."""

import re

import pytest

from tests import mutants


@pytest.mark.campaign
def test_no_mutant_survives():
    assert mutants.main([]) == 0


def test_every_mutation_still_applies():
    """The old text of every edit occurs exactly once in the source."""
    for mutant in mutants.MUTANTS:
        for edit in mutant.edits:
            text = (mutants.ROOT / "src" / "lipflow" / edit.file).read_text()
            assert text.count(edit.old) == 1, f"{mutant.name}: {edit.old!r} in {edit.file}"


def test_the_page_lists_every_mutant_and_names_tests_that_exist():
    page = (mutants.ROOT / "docs" / "mutants.md").read_text()
    listed = {line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if "` |" in line}
    assert listed == {mutant.name for mutant in mutants.MUTANTS}
    named = re.findall(r"\| `(tests/\S+)::(\w+)", page)
    assert len(named) == len(listed)
    assert [name for file, name in named if f"def {name}(" not in (mutants.ROOT / file).read_text()] == []

"""Every known way to be unsound turns some test red: see tests/mutants.py, which also runs by itself."""

import pytest

from tests import mutants


@pytest.mark.campaign
def test_no_mutant_survives():
    assert mutants.main([]) == 0


def test_every_mutation_still_applies():
    """The source moves on; a mutation that no longer finds its place tests nothing."""
    for mutant in mutants.MUTANTS:
        for edit in mutant.edits:
            text = (mutants.ROOT / "src" / "lipflow" / edit.file).read_text()
            assert text.count(edit.old) == 1, f"{mutant.name}: {edit.old!r} in {edit.file}"


def test_the_page_lists_every_mutant():
    page = (mutants.ROOT / "docs" / "mutants.md").read_text()
    listed = {line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if "` |" in line}
    assert listed == {mutant.name for mutant in mutants.MUTANTS}

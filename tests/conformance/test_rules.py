"""Each rule is named in a test, or says why not."""

import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest

TESTS = Path(__file__).parents[1]
ID = re.compile(r"\b[SE]-\d+\b")
RULES = tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))


def named_in_tests() -> set[str]:
    """Collect the ids in the sources of all tests."""
    return {found for path in TESTS.rglob("*.py") for found in ID.findall(path.read_text(encoding="utf-8"))}


def in_order(ids: set[str]) -> list[str]:
    """Sort as people would."""
    return sorted(ids, key=lambda name: (name[0], int(name[2:])))


def test_rules_are_tested_or_excepted() -> None:
    """Neither forgotten nor both."""
    named = named_in_tests()
    excepted = {name for name, rule in RULES.items() if "exception" in rule}
    assert not in_order(RULES.keys() - named - excepted), "in no test"
    assert not in_order(excepted & named), "in a test, and excepted"


def test_tests_name_rules_that_exist() -> None:
    """No test claims a rule that is not in the table."""
    assert not in_order(named_in_tests() - RULES.keys())


def test_the_table_is_well_formed() -> None:
    """Each rule says what it is; an exception says why."""
    for name, rule in RULES.items():
        assert ID.fullmatch(name), name
        assert rule.keys() - {"exception"} == {"rule"}, name
        assert all(isinstance(text, str) and text for text in rule.values()), name

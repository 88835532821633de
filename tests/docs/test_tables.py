"""The tables of the documentation are complete: every status code, every option."""

import re
from pathlib import Path

from llm_datadist import LLMConfig, LLMStatusCode

DOCS = Path(__file__).parents[2] / "docs"


def first_cells(page: str) -> list[str]:
    return [line.split("|")[1].strip() for line in (DOCS / page).read_text().splitlines() if line.startswith("| ")]


def test_each_status_code_has_one_row():
    cells = [cell.strip("`") for cell in first_cells("errors.md") if cell.startswith("`")]
    assert cells == list(LLMStatusCode.__members__)


def test_each_property_of_the_configuration_has_one_row():
    properties = {name for name, value in vars(LLMConfig).items() if hasattr(value, "__set__") and name[0] != "_"}
    cells = [cell.strip("`") for cell in first_cells("configuration.md") if re.fullmatch("`[a-z_]+`", cell)]
    assert len(cells) == len(set(cells))
    assert properties == set(cells)


def test_each_environment_variable_in_the_source_is_documented():
    root = DOCS.parent
    text = (DOCS / "configuration.md").read_text()
    for file in [*(root / "llm_datadist").rglob("*.py*"), *(root / "backends").rglob("*.py")]:
        if file.suffix in (".py", ".pyx"):
            for name in re.findall(r"[\"'](LLM_DATADIST_[A-Z_]+|llm\.[A-Za-z.]+)[\"']", file.read_text()):
                assert f"`{name}`" in text, f"{file.name}: {name}"

"""Every public name has a docstring and a place in the reference."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import llm_datadist
from llm_datadist.cache_manager import CacheManager

DOCS = Path(__file__).parents[2] / "docs"
CLASSES = [
    value
    for name in llm_datadist.__all__
    if inspect.isclass(value := getattr(llm_datadist, name)) and name != "LlmConfig"
]
MODULES = ["configs", "data_type", "status", "utils.utils", "v2.llm_utils"]


def functions() -> list[tuple[str, object]]:
    found = []
    for module in MODULES:
        source = importlib.import_module(f"llm_datadist.{module}")
        found += [(f"llm_datadist.{module}.{name}", getattr(source, name)) for name in source.__all__]
    return [(path, value) for path, value in found if inspect.isfunction(value)]


def is_documented(value: object) -> bool:
    """Say whether a docstring has a summary that ends in a full stop."""
    return (inspect.getdoc(value) or "").split("\n\n")[0].endswith(".")


def test_each_name_has_a_place():
    text = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    placed = set(re.findall(r"^\.\. auto(?:class|function):: (\S+)", text, re.MULTILINE))
    expected = {f"llm_datadist.{cls.__name__}" for cls in CLASSES} | {path for path, _ in functions()}
    assert expected | {"llm_datadist.cache_manager.CacheManager"} <= placed


@pytest.mark.parametrize("cls", [*CLASSES, CacheManager], ids=lambda cls: cls.__name__)
def test_each_member_has_a_summary(cls):
    assert is_documented(cls)
    ours = {name for base in cls.__mro__ if base.__module__.startswith("llm_datadist") for name in vars(base)}
    for name in ours:
        member = inspect.getattr_static(cls, name)
        if not name.startswith("_") and (callable(member) or hasattr(member, "__get__")):
            assert is_documented(member), f"{cls.__name__}.{name}"


@pytest.mark.parametrize(("path", "function"), functions(), ids=lambda value: value if isinstance(value, str) else "")
def test_each_function_has_a_summary(path, function):
    assert is_documented(function), path


def test_each_argument_of_the_managers_is_described():
    for manager in (llm_datadist.KvCacheManager, CacheManager, llm_datadist.LLMDataDist):
        for name, method in inspect.getmembers(manager, inspect.isfunction):
            if name.startswith("_"):
                continue
            described = inspect.getdoc(method)
            for argument in list(inspect.signature(method).parameters.values())[1:]:
                if argument.kind is not inspect.Parameter.VAR_KEYWORD:
                    assert re.search(rf"^(.*, )?{argument.name}(, .*)?( :|$)", described, re.MULTILINE), (
                        name,
                        argument,
                    )


def test_pages_name_files_that_exist():
    for page in DOCS.rglob("*.md"):
        if "_build" not in page.parts:
            for target in re.findall(r"\]\(([^)#:]+\.md)", page.read_text()):
                assert (page.parent / target).is_file(), f"{page.name}: {target}"
    for target in re.findall(r"\]\(([^)#:]+\.md)", (DOCS.parent / "README.md").read_text()):
        assert (DOCS.parent / target).is_file(), target

"""Who may import whom: facade, engine, then the backend interface and the kernels; never the other way."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE, BACKENDS, FIRST = ROOT / "llm_datadist", ROOT / "backends", ROOT / "llm_datadist_v1"

MEANINGS = {f"llm_datadist.{name}" for name in ("status", "cache_types", "configs", "datadist", "kv_cache_manager")}


def imports(file: Path, *, with_typing: bool = True) -> Iterator[str]:
    """Give the names of modules that a file imports, also inside functions."""
    tree = ast.parse(file.read_text(), str(file))
    hidden = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not with_typing:
            hidden |= {id(inner) for statement in node.body for inner in ast.walk(statement)}
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            assert node.module is not None
            yield node.module
            # A name may be a module of its own: ``from llm_datadist import status``.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def python_files(folder: Path) -> list[Path]:
    files = sorted(folder.rglob("*.py"))
    assert files, f"no Python files in {folder}"
    return files


def ours(file: Path, **options: bool) -> set[str]:
    top = ("llm_datadist", "llm_datadist_v1", "backends")
    return {name for name in imports(file, **options) if name.split(".")[0] in top}


def below(name: str, *parents: str) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def test_nobody_imports_the_folder_name():
    for file in python_files(PACKAGE) + python_files(BACKENDS):
        assert not [name for name in ours(file) if below(name, "backends")], file


def test_kernels_import_nothing_of_ours_but_each_other():
    kernels = PACKAGE / "_kernels"
    for file in python_files(kernels):
        assert all(below(name, "llm_datadist._kernels") for name in ours(file)), file
    for file in sorted(kernels.glob("*.p[yx][xd]")):
        for line in file.read_text().splitlines():
            words = line.split()
            if words[:1] and words[0] in ("from", "import", "cimport") and words[1].split(".")[0] == "llm_datadist":
                assert below(words[1], "llm_datadist._kernels"), f"{file}: {line}"


def test_backends_know_memory_and_kernels_only():
    allowed = ("llm_datadist.backend", "llm_datadist.backends", "llm_datadist._kernels")
    for file in python_files(BACKENDS):
        names = ours(file) - {"llm_datadist"}
        assert not [name for name in names if below(name, *MEANINGS)], f"{file} knows what bytes mean"
        assert all(below(name, *allowed) for name in names), f"{file}: {sorted(names)}"


def test_the_engine_knows_no_backend_by_name():
    names = [folder.name for folder in BACKENDS.iterdir() if (folder / "__init__.py").is_file()]
    assert names
    for file in python_files(PACKAGE / "_engine"):
        assert not [name for name in ours(file) if below(name, "llm_datadist.backends")], file
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value not in names, f"{file} line {node.lineno} names the backend {node.value!r}"


def test_the_engine_does_not_import_the_facade():
    facade = (
        "llm_datadist.datadist",
        "llm_datadist.kv_cache_manager",
        "llm_datadist.cache_manager",
        "llm_datadist.cli",
    )
    for file in python_files(PACKAGE / "_engine"):
        assert not [name for name in ours(file, with_typing=False) if below(name, *facade)], file


def test_the_backend_interface_imports_no_engine_and_no_meaning():
    names = ours(PACKAGE / "backend.py", with_typing=False)
    assert not [name for name in names if below(name, "llm_datadist._engine", *MEANINGS)]


def test_the_demo_uses_the_public_api_alone():
    for file in python_files(PACKAGE / "demo"):
        private = [name for name in ours(file) if any(part.startswith("_") for part in name.split("."))]
        assert private in ([], ["llm_datadist._built"]), file


def test_only_programs_import_the_paths_made_for_them():
    for file in python_files(PACKAGE) + python_files(BACKENDS):
        if file.parent != PACKAGE / "v2":
            assert not [name for name in ours(file) if below(name, "llm_datadist.v2", "llm_datadist_v1")], file


def test_no_cython_beside_the_mapping():
    assert not [*BACKENDS.rglob("*.pyx"), *BACKENDS.rglob("*.pxd")]
    assert not (PACKAGE / "backends").exists()


@pytest.mark.parametrize("name", ["llm_datadist", "llm_datadist.backends", "llm_datadist_v1"])
def test_every_package_is_listed_in_the_build_script(name):
    top = {"llm_datadist": PACKAGE, "llm_datadist.backends": BACKENDS, "llm_datadist_v1": FIRST}[name]
    expected = {".".join([name, *init.parent.relative_to(top).parts]) for init in top.rglob("__init__.py")}
    calls = [node for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())) if isinstance(node, ast.keyword)]
    listed = next(set(ast.literal_eval(node.value)) for node in calls if node.arg == "packages")
    assert expected <= listed

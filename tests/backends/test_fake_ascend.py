"""The fake Ascend driver answers like the real one and records wrong use: called through ctypes, without a backend."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FAKE = Path(__file__).parents[1] / "fakes" / "ascend"


def load(name: str) -> ModuleType:
    """Import a module from the folder of the fake, which isn't on the path of other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FAKE))
        return importlib.import_module(name)


def load_build() -> ModuleType:
    """Import the build, under another name: there is a package of that name that may be installed."""
    spec = importlib.util.spec_from_file_location("fake_ascend_build", FAKE / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load_build()
driver = load("driver")
scenes = load("scenes")
for each in scenes.MODULES:
    load(each)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the fake once."""
    return build.build(tmp_path_factory.mktemp("fake"))


def environment() -> dict[str, str]:
    """Give an environment in which only what a test sets can change the fake, and no two tests meet."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FAKE_ASCEND", "HCCL", "ASCEND"))}
    return kept | {"FAKE_ASCEND_DOMAIN": kept["LLM_DATADIST_NAMESPACE"], "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.mark.parametrize("name", [*scenes.SCENES])
def test_scene(name: str, libraries: tuple[Path, Path]) -> None:
    """A1 to A33, H1 to H38: each in a process of its own, which checks codes, bytes and records."""
    command = [sys.executable, "-S", str(FAKE / "scenes.py"), *map(str, libraries), name]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_every_id_has_a_scene() -> None:
    """Every mistake that shows in a record is provoked by a scene."""
    provoked = {each for scene in scenes.SCENES.values() for each in scene.records}
    sources = "".join(path.read_text() for path in FAKE.glob("*.c"))
    ids = [f"A{n}" for n in range(1, 34)] + [f"H{n}" for n in range(1, 39)] + ["H2b", "H14b"]
    recorded = {each for each in ids if f'"{each}"' in sources}
    # A process that ends can't look at its own records any more: leaks_at_exit reads its report.
    assert recorded - provoked == {"H37"}


def test_lacking_symbols(tmp_path: Path) -> None:
    """A build leaves out what it is told to, and nothing else."""
    lacking = [*build.NEWER_THAN_8_1, "aclrtMalloc", "HcclBatchGet"]
    acl, hccl = build.build(tmp_path, lacks=lacking)
    script = (
        "import ctypes, sys; acl, hccl = (ctypes.CDLL(each) for each in sys.argv[1:3]);"
        "print(*(name for name in sys.argv[3:] if not hasattr(hccl if name[0] == 'H' else acl, name)))"
    )
    names = [*driver.PROTOTYPES, *driver.TEXTS]
    command = [sys.executable, "-S", "-c", script, str(acl), str(hccl), *names]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=True)
    assert set(done.stdout.split()) == set(lacking)

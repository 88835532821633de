"""What the probe tells about a machine, that it leaves ACL alone, and what ``auto`` makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from acl_libraries import build_acl, build_hccl, run

from llm_datadist.backends.acl.products import Product, product_of

#: The state is read from the library itself: is ACL initialised, how often was it, and was anything asked outside.
PROBE = """
import ctypes, json, os
from llm_datadist.backends.acl.probe import probe
found = probe(os.environ)
paths = found.paths and [found.paths.acl, found.paths.hccl]
state = []
if paths:
    acl = ctypes.CDLL(paths[0])
    state = [ctypes.c_int.in_dll(acl, name).value for name in ("references", "inits", "outside")]
print(json.dumps([
    found.installed.value, found.reasons, paths, found.version, found.soc_name,
    found.product and found.product.value, found.devices, state, "aclrtMemsetAsync" in found.missing,
]))
"""

COUNTED = {
    "before all": "int references, inits, outside;",
    "aclInit": "int aclInit(void *path) { (void)path; inits++; return references++ ? 100002 : 0; }",
    "aclFinalizeReference": """
        int aclFinalizeReference(void *count) { outside |= count != 0; return references-- > 0 ? 0 : 100037; }""",
    "aclrtGetVersion": """
        int aclrtGetVersion(int *a, int *b, int *c) { outside |= !references; *a = 1; *b = 17; *c = 3; return 0; }""",
    "aclrtGetSocName": """
        const char *aclrtGetSocName(void) { outside |= !references; return "Ascend910_9391"; }""",
    "aclrtGetDeviceCount": """
        int aclrtGetDeviceCount(unsigned *count) { outside |= !references; *count = 16; return 0; }""",
}
DENIED = {"aclrtGetDeviceCount": "int aclrtGetDeviceCount(unsigned *count) { *count = 0; return 507899; }"}


def install(folder: Path, **given: Any) -> None:
    build_acl(folder / "libacl_rt.so", **given)
    build_hccl(folder / "libhcomm.so")


def test_nothing_installed(tmp_path: Path):
    installed, reasons, paths, *rest = run(PROBE, tmp_path)
    assert (installed, paths, rest) == ("no", None, [None, None, None, None, [], False])
    assert [reason.partition(":")[0] for reason in reasons] == ["libacl_rt.so", "libascendcl.so"]


def test_a_runtime_is_asked_and_left_as_it_was(tmp_path: Path):
    install(tmp_path, **COUNTED)
    paths = ["libacl_rt.so", "libhcomm.so"]
    assert run(PROBE, tmp_path) == ["yes", [], paths, [1, 17, 3], "Ascend910_9391", "A3", 16, [0, 1, 0], True]


def test_another_owner_keeps_acl_initialised(tmp_path: Path):
    install(tmp_path, **{**COUNTED, "before all": "int references = 1, inits, outside;"})
    assert run(PROBE, tmp_path)[7] == [1, 1, 0]


def test_a_runtime_that_can_not_be_left_as_it_was_is_not_asked(tmp_path: Path):
    install(tmp_path, lacks=("aclFinalizeReference",), **COUNTED)
    installed, reasons, _, version, soc_name, product, devices, state, _ = run(PROBE, tmp_path)
    assert (installed, version, soc_name, product, devices, state) == ("yes", None, None, None, None, [0, 0, 0])
    assert "without aclFinalizeReference" in reasons[0]


def test_a_refused_candidate_is_told_although_the_next_one_is_good(tmp_path: Path):
    install(tmp_path, **COUNTED)
    installed, reasons, *_ = run(PROBE, tmp_path, LLM_DATADIST_ACL_LIBRARY=str(tmp_path / "gone.so"))
    assert installed == "yes"
    assert reasons == [f"{tmp_path}/gone.so: cannot open shared object file: No such file or directory"]


def test_a_runtime_without_a_mandatory_function_is_broken(tmp_path: Path):
    install(tmp_path, lacks=("aclrtMalloc",))
    installed, reasons, paths, *_ = run(PROBE, tmp_path)
    assert (installed, paths) == ("broken", None)
    assert reasons[0] == "libacl_rt.so lacks aclrtMalloc"


def test_a_runtime_that_does_not_answer_is_broken_and_left_as_it_was(tmp_path: Path):
    install(tmp_path, **{**COUNTED, **DENIED})
    installed, reasons, _, *_, state, _ = run(PROBE, tmp_path)
    assert (installed, state) == ("broken", [0, 1, 0])
    assert reasons == ["aclrtGetDeviceCount failed, internal error of the driver (507899)"]


def test_a_runtime_that_can_not_be_initialised_is_broken(tmp_path: Path):
    install(tmp_path, **{**COUNTED, "aclInit": "int aclInit(void *path) { (void)path; return 500000; }"})
    installed, reasons, _, *_, state, _ = run(PROBE, tmp_path)
    assert (installed, state) == ("broken", [0, 0, 0])
    assert reasons == ["aclInit failed, INTERNAL (500000)"]


def test_a_chip_without_a_name_has_no_product(tmp_path: Path):
    nameless = "const char *aclrtGetSocName(void) { return 0; }"
    install(tmp_path, **{**COUNTED, "aclrtGetSocName": nameless})
    assert run(PROBE, tmp_path)[3:7] == [[1, 17, 3], None, None, 16]


@pytest.mark.parametrize(
    ("soc_name", "product"),
    [
        ("Ascend910B1", Product.A2),
        ("Ascend910B2C", Product.A2),
        ("Ascend910B4-1", Product.A2),
        ("Ascend910_9391", Product.A3),
        ("Ascend910_9362", Product.A3),
        ("Ascend950", Product.A5),
        ("Ascend310P3", Product.OTHER),
        ("Ascend910", Product.OTHER),
        ("", Product.OTHER),
    ],
)
def test_products_by_the_name_of_the_chip(soc_name: str, product: Product):
    assert product_of(soc_name) is product


# --- auto ---------------------------------------------------------------------------------------------------------

#: In the place of the acl backend is a class that is made without any device.
AUTO = """
import json, warnings
from llm_datadist import backends
from llm_datadist.backend import make_backend
backends.BUILT_IN["acl"] = "fractions:Fraction"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    made = make_backend("auto")
print(json.dumps([type(made).__name__, [[each.category.__name__, str(each.message)] for each in caught]]))
"""


def test_auto_takes_the_simulator_where_nothing_is_installed_and_says_so_once(tmp_path: Path):
    made, warned = run(AUTO, tmp_path)
    assert made == "SimulatorBackend"
    assert [category for category, _ in warned] == ["RuntimeWarning"]
    assert "no Ascend runtime was found: using the simulator" in warned[0][1]


def test_auto_takes_acl_where_a_runtime_is_installed(tmp_path: Path):
    install(tmp_path)
    assert run(AUTO, tmp_path) == ["Fraction", []]


@pytest.mark.parametrize("how", ["a function is missing", "HCCL is missing", "no library", "a wrong path"])
def test_auto_never_takes_the_simulator_for_a_broken_runtime(tmp_path: Path, how: str):
    environment = {}
    if how == "a function is missing":
        install(tmp_path, lacks=("aclrtFree",))
    elif how == "HCCL is missing":
        build_acl(tmp_path / "libacl_rt.so")
    elif how == "no library":
        (tmp_path / "libascendcl.so").write_text("no library" * 100)
    else:
        environment["LLM_DATADIST_HCCL_LIBRARY"] = str(tmp_path / "gone.so")
    assert run(AUTO, tmp_path, **environment) == ["Fraction", []]


def test_choosing_initialises_nothing(tmp_path: Path):
    install(tmp_path, **COUNTED)
    script = (
        AUTO
        + """
import ctypes
assert ctypes.c_int.in_dll(ctypes.CDLL("libacl_rt.so"), "inits").value == 0
"""
    )
    assert run(script, tmp_path)[0] == "Fraction"


def test_the_simulator_by_name_looks_for_no_runtime(tmp_path: Path):
    install(tmp_path)
    script = """
import json
from llm_datadist.backend import make_backend
made = make_backend("simulator")
print(json.dumps([type(made).__name__, "libacl_rt.so" in open("/proc/self/maps").read()]))
"""
    assert run(script, tmp_path) == ["SimulatorBackend", False]

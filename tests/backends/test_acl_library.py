"""Which libraries the acl backend opens, what it says about those that it refuses, and how it calls them."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest
from acl_libraries import build, build_acl, build_hccl, run

from llm_datadist.backends.acl import functions, library, structures

OPEN = """
import json, os
from llm_datadist.backends.acl.library import Broken, NotInstalled, open_library
try:
    library = open_library(os.environ)
    found = ["opened", library.paths.acl, library.paths.hccl, library.refused]
except (NotInstalled, Broken) as e:
    found = [type(e).__name__, e.kind.name, e.text, e.reasons]
print(json.dumps(found))
"""

MANDATORY = """
aclInit aclrtSetDevice aclrtResetDevice aclrtGetDevice aclrtGetDeviceCount aclrtSetCurrentContext aclrtGetCurrentContext
aclrtCreateStreamWithConfig aclrtDestroyStream aclrtSynchronizeStream aclrtSynchronizeStreamWithTimeout aclrtStreamAbort
aclrtMalloc aclrtFree aclrtMallocHost aclrtFreeHost aclrtMemcpy aclrtMemcpyAsync aclrtMemset aclrtGetMemInfo
aclrtGetSocName aclGetRecentErrMsg
HcclCommInitClusterInfoMemConfig HcclCommDestroy HcclRegisterGlobalMem HcclDeregisterGlobalMem HcclCommBindMem
HcclCommUnbindMem HcclCommPrepare HcclExchangeMemDesc HcclBatchGet HcclBatchPut HcclRemapRegistedMemory
"""


def absent(name: str) -> str:
    return f"{name}: cannot open shared object file: No such file or directory"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Give an ACL and an HCCL that nothing is wrong with, under names that nobody searches."""
    folder = tmp_path_factory.mktemp("good")
    return build_acl(folder / "acl.so"), build_hccl(folder / "hccl.so")


def link(path: Path, to: Path) -> None:
    path.symlink_to(to)


def test_the_mandatory_functions_are_those_of_the_abi():
    assert {each.name for each in (*functions.ACL, *functions.HCCL) if each.mandatory} == set(MANDATORY.split())


def test_nothing_is_installed(tmp_path: Path):
    reasons = [absent("libacl_rt.so"), absent("libascendcl.so")]
    text = "no Ascend runtime is installed: " + "; ".join(reasons)
    assert run(OPEN, tmp_path) == ["NotInstalled", "UNAVAILABLE", text, reasons]


@pytest.mark.parametrize(
    ("present", "acl", "hccl"),
    [
        ("libacl_rt.so libascendcl.so libhcomm.so libhccl.so", "libacl_rt.so", "libhcomm.so"),
        ("libascendcl.so libhccl.so", "libascendcl.so", "libhccl.so"),
    ],
)
def test_candidates_are_taken_in_order(tmp_path: Path, good: tuple[Path, Path], present: str, acl: str, hccl: str):
    for name in present.split():
        link(tmp_path / name, good["hc" in name])
    refused = [] if acl == "libacl_rt.so" else [absent("libacl_rt.so"), absent("libhcomm.so")]
    assert run(OPEN, tmp_path) == ["opened", acl, hccl, refused]


def test_paths_in_the_environment_come_first(tmp_path: Path, good: tuple[Path, Path]):
    for name in ("libacl_rt.so", "libhcomm.so"):
        link(tmp_path / name, good["hc" in name])
    acl, hccl = map(str, good)
    found = run(OPEN, tmp_path, LLM_DATADIST_ACL_LIBRARY=acl, LLM_DATADIST_HCCL_LIBRARY=hccl)
    assert found == ["opened", acl, hccl, []]


def test_an_empty_path_in_the_environment_is_none(tmp_path: Path):
    assert run(OPEN, tmp_path, LLM_DATADIST_ACL_LIBRARY="", LLM_DATADIST_HCCL_LIBRARY="")[0] == "NotInstalled"


def test_after_a_wrong_path_the_others_are_tried_and_its_reason_is_kept(tmp_path: Path, good: tuple[Path, Path]):
    link(tmp_path / "libacl_rt.so", good[0])
    wrong = str(tmp_path / "gone.so")
    found = run(OPEN, tmp_path, LLM_DATADIST_ACL_LIBRARY=wrong, LLM_DATADIST_HCCL_LIBRARY=str(good[1]))
    assert found == ["opened", "libacl_rt.so", str(good[1]), [absent(wrong)]]


@pytest.mark.parametrize("variable", ["LLM_DATADIST_ACL_LIBRARY", "LLM_DATADIST_HCCL_LIBRARY"])
def test_what_the_environment_names_is_never_taken_for_not_installed(tmp_path: Path, variable: str):
    outcome, kind, text, _ = run(OPEN, tmp_path, **{variable: str(tmp_path / "gone.so")})
    assert (outcome, kind) == ("Broken", "UNAVAILABLE")
    assert text.startswith("the Ascend runtime can't be used: ")


def test_a_file_that_is_no_library_is_a_broken_runtime(tmp_path: Path):
    (tmp_path / "libacl_rt.so").write_text("this is no library, and longer than the header of one would be" * 9)
    outcome, _, _, reasons = run(OPEN, tmp_path)
    assert outcome == "Broken"
    assert "libacl_rt.so: invalid ELF header" in reasons[0]
    assert reasons[1] == absent("libascendcl.so")


def test_a_path_that_can_not_be_read_is_told(tmp_path: Path):
    outcome, _, _, reasons = run(OPEN, tmp_path, LLM_DATADIST_ACL_LIBRARY=str(tmp_path))
    assert outcome == "Broken"
    assert reasons[0] == f"{tmp_path}: cannot read file data: Is a directory"


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_a_file_without_permission_is_a_broken_runtime(tmp_path: Path, good: tuple[Path, Path]):
    (tmp_path / "libacl_rt.so").write_bytes(good[0].read_bytes())
    (tmp_path / "libacl_rt.so").chmod(0)
    outcome, _, _, reasons = run(OPEN, tmp_path)
    assert outcome == "Broken"
    assert "Permission denied" in reasons[0]


def test_a_library_that_needs_a_missing_one_is_a_broken_runtime(tmp_path: Path):
    needed = build(tmp_path / "libascend_hal.so", "int hal(void) { return 0; }", "-Wl,-soname,libascend_hal.so")
    build(
        tmp_path / "libacl_rt.so",
        "int hal(void); int aclInit(void) { return hal(); }",
        "-Wl,--no-as-needed",
        str(needed),
    )
    needed.unlink()
    outcome, _, _, reasons = run(OPEN, tmp_path)
    assert outcome == "Broken"
    assert reasons[0] == f"libacl_rt.so: {absent('libascend_hal.so')}"


def test_a_library_without_a_mandatory_function_is_refused_by_name(tmp_path: Path, good: tuple[Path, Path]):
    build_acl(tmp_path / "libacl_rt.so", lacks=("aclrtStreamAbort", "aclrtMemset"))
    link(tmp_path / "libascendcl.so", good[0])
    build_hccl(tmp_path / "libhcomm.so", lacks=("HcclBatchGet",))
    link(tmp_path / "libhccl.so", good[1])
    refused = ["libacl_rt.so lacks aclrtStreamAbort, aclrtMemset", "libhcomm.so lacks HcclBatchGet"]
    assert run(OPEN, tmp_path) == ["opened", "libascendcl.so", "libhccl.so", refused]


def test_all_reasons_are_in_the_error(tmp_path: Path, good: tuple[Path, Path]):
    build_acl(tmp_path / "libacl_rt.so", lacks=("aclInit",))
    link(tmp_path / "libascendcl.so", good[0])
    build_hccl(tmp_path / "libhccl.so", lacks=("HcclBatchPut",))
    outcome, _, text, reasons = run(OPEN, tmp_path)
    assert outcome == "Broken"
    assert reasons == ["libacl_rt.so lacks aclInit", absent("libhcomm.so"), "libhccl.so lacks HcclBatchPut"]
    assert text == "the Ascend runtime can't be used: " + "; ".join(reasons)


def test_hccl_may_use_what_acl_brings(tmp_path: Path, good: tuple[Path, Path]):
    link(tmp_path / "libacl_rt.so", good[0])
    build_hccl(
        tmp_path / "libhcomm.so",
        HcclCommDestroy="int aclrtFree(void *); int HcclCommDestroy(void *comm) { return aclrtFree(comm); }",
    )
    assert run(OPEN, tmp_path)[:3] == ["opened", "libacl_rt.so", "libhcomm.so"]


def test_a_missing_library_is_known_in_any_language(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "strerror", lambda number: "Datei oder Verzeichnis nicht gefunden")
    german = "Kann die Shared-Object-Datei nicht öffnen: Datei oder Verzeichnis nicht gefunden"
    assert library._is_absent("libacl_rt.so", OSError(f"libacl_rt.so: {german}"))
    assert not library._is_absent("libacl_rt.so", OSError(f"libascend_hal.so: {german}"))
    assert not library._is_absent("libacl_rt.so", OSError("libacl_rt.so: Keine Berechtigung"))


def test_importing_opens_nothing(tmp_path: Path, good: tuple[Path, Path]):
    for name in ("libacl_rt.so", "libhcomm.so"):
        link(tmp_path / name, good["hc" in name])
    script = """
import json
import llm_datadist
import llm_datadist.backends.acl.library
import llm_datadist.backends.acl.probe
import llm_datadist.backends.acl.topology
maps = open("/proc/self/maps").read()
print(json.dumps(["acl.so" in maps, "hccl.so" in maps]))
"""
    assert run(script, tmp_path) == [False, False]


# --- calls --------------------------------------------------------------------------------------------------------


def call(folder: Path, script: str, **given: Any) -> Any:
    """Run a script with an opened ``library``."""
    build_acl(folder / "libacl_rt.so", **given)
    build_hccl(folder / "libhcomm.so", HcclBatchGet="int HcclBatchGet(void) { return 4; }")
    start = (
        "import ctypes, json, os, threading\nfrom llm_datadist.backends.acl.library import NativeError, open_library\n"
    )
    return run(start + "library = open_library(os.environ)\n" + script, folder)


MESSAGE = {
    "before all": "static const char *message;",
    "aclGetRecentErrMsg": """
        const char *aclGetRecentErrMsg(void) { const char *now = message; message = 0; return now; }""",
    "aclrtFree": r"""
        int aclrtFree(void *address) { message = address ? "EZ9999: it's \xff gone\n" : 0; return 107000; }""",
}


def test_a_failure_carries_code_name_and_message(tmp_path: Path):
    script = """
def failure(name, *args):
    try:
        library.call(name, *args)
    except NativeError as e:
        return [e.function, e.code, e.name, e.message, str(e)]
failures = [failure("aclrtFree", 8), failure("aclrtFree", None), failure("HcclBatchGet", 1, 1, None, 1, 1)]
code = library.code("aclrtFree", 8)
print(json.dumps([*failures, code, library.recent(), library.call("aclrtResetDevice", 0)]))
"""
    assert call(tmp_path, script, **MESSAGE) == [
        [
            "aclrtFree",
            107000,
            "RT_PARAM_INVALID",
            "EZ9999: it's \ufffd gone",
            "aclrtFree failed, RT_PARAM_INVALID (107000): EZ9999: it's \ufffd gone",
        ],
        ["aclrtFree", 107000, "RT_PARAM_INVALID", "", "aclrtFree failed, RT_PARAM_INVALID (107000)"],
        ["HcclBatchGet", 4, "INTERNAL", "", "HcclBatchGet failed, INTERNAL (4)"],
        107000,
        "",  # dropped with the failure
        None,
    ]


def test_arguments_and_results_have_the_width_of_the_abi(tmp_path: Path):
    script = """
out, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
library.call("aclrtMalloc", ctypes.byref(out), (1 << 40) + 5, 0)
library.call("aclrtGetMemInfo", 1, ctypes.byref(free), ctypes.byref(total))
print(json.dumps([out.value, free.value, total.value]))
"""
    sources = {
        "aclrtMalloc": """
            int aclrtMalloc(void **out, unsigned long size, int policy) { *out = (char *)size + policy; return 0; }""",
        "aclrtGetMemInfo": """int aclrtGetMemInfo(int attr, unsigned long *free, unsigned long *total)
            { *free = 1ul << 36; *total = attr; return 0; }""",
    }
    assert call(tmp_path, script, **sources) == [(1 << 40) + 5, 1 << 36, 1]


def test_optional_functions_are_looked_up(tmp_path: Path):
    script = """
print(json.dumps([library.has("aclrtMemsetAsync"), library.has("aclFinalize"), library.has("aclInit"),
                  "aclrtMemsetAsync" in library.missing, "aclFinalize" in library.missing]))
"""
    sources = {"aclFinalize": "int aclFinalize(void) { return 0; }"}
    assert call(tmp_path, script, **sources) == [False, True, True, True, False]


def test_calls_let_other_threads_run(tmp_path: Path):
    # Each of two calls waits in C for the other to begin.
    script = """
codes = []
thread = threading.Thread(target=lambda: codes.append(library.code("aclrtFree", None)))
thread.start()
codes.append(library.code("aclrtSynchronizeStream", None))
thread.join()
print(json.dumps(codes))
"""
    sources = {
        "before all": """
            #include <unistd.h>
            static volatile int begun[2];
            static int meet(int me)
            {
                begun[me] = 1;
                for (int ms = 0; ms < 20000 && !begun[!me]; ms++) usleep(1000);
                return !begun[!me];
            }""",
        "aclrtFree": "int aclrtFree(void *address) { (void)address; return meet(0); }",
        "aclrtSynchronizeStream": "int aclrtSynchronizeStream(void *stream) { (void)stream; return meet(1); }",
    }
    assert call(tmp_path, script, **sources) == [0, 0]


# --- structures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("structure", "size", "offsets"),
    [
        (structures.AclrtMemLocation, 8, {"id": 0, "type": 4}),
        (structures.AclrtMemcpyBatchAttr, 32, {"dstLoc": 0, "srcLoc": 8, "rsv": 16}),
        (structures.AclrtPtrAttributes, 28, {"location": 0, "pageSize": 8, "rsv": 12}),
        (structures.CommMem, 24, {"type": 0, "addr": 8, "size": 16}),
        (structures.HcclMemDesc, 512, {}),
        (structures.HcclMemDescs, 16, {"array": 0, "arrayLength": 8}),
        (structures.HcclOneSideOpDesc, 32, {"localAddr": 0, "remoteAddr": 8, "count": 16, "dataType": 24}),
        (structures.HcclPrepareConfig, 32, {"topoType": 0, "reserved": 8}),
        (
            structures.HcclCommConfig,
            4096,
            {
                "size": 0,
                "magic": 8,
                "version": 12,
                "hcclBufferSize": 24,
                "hcclDeterministic": 28,
                "hcclCommName": 32,
                "hcclUdi": 160,
                "hcclOpExpansionMode": 288,
                "hcclRdmaTrafficClass": 292,
                "hcclRdmaServiceLevel": 296,
            },
        ),
    ],
)
def test_structures_have_the_layout_of_the_abi(structure: type[ctypes.Structure], size: int, offsets: dict[str, int]):
    assert ctypes.sizeof(structure) == size
    assert {name: getattr(structure, name).offset for name in offsets} == offsets


def test_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(structures, "_LAYOUTS", ((structures.CommMem, 20, (0, 4, 8)),))
    with pytest.raises(ImportError, match=r"CommMem has 24 bytes .* want 20 bytes and fields at \(0, 4, 8\)"):
        structures._check_layouts()


def test_the_settings_of_a_communicator():
    config = structures.comm_config(b"x" * structures.COMM_NAME_BYTES, service_level=3)
    assert ctypes.addressof(config) % 8 == 0
    whole = bytes(config)
    words = [int.from_bytes(whole[at : at + 4], "little") for at in (0, 4, 8, 12, 24, 28, 288, 292, 296)]
    assert words == [300, 0, 0xF0F0F0F0, 5, 200, 0, 0, 0xFFFFFFFF, 3]
    assert whole[32:160] == b"x" * 127 + b"\0"
    assert not any(whole[300:])

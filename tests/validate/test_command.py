"""The command as users run it: a dry run of all of it on the fake driver, and what it says when something is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import ascend
import pytest

from llm_datadist.cli import main

LIMIT_S = 110
NEWER_THAN_8_1 = ("aclFinalizeReference", "aclrtMemcpyBatch", "aclrtGetPhyDevIdByLogicDevId", "aclrtGetDeviceInfo")
SECRET = "a secret of this test"


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Build the fake driver; give the variables that name it."""
    acl, hccl = ascend.build(tmp_path_factory.mktemp("fake"))
    return {"LLM_DATADIST_ACL_LIBRARY": str(acl), "LLM_DATADIST_HCCL_LIBRARY": str(hccl)}


@pytest.fixture
def machine(libraries: dict[str, str], tmp_path: Path) -> Iterator[dict[str, str]]:
    """Give the environment of a machine with devices; fail when somebody used its driver wrongly."""
    reports = tmp_path / "reports"
    reports.mkdir()
    yield {
        **libraries,
        "FAKE_ASCEND_REPORT": str(reports),
        "FAKE_ASCEND_DOMAIN": f"{os.getpid()}-{tmp_path.name}"[-60:],
    }
    wrong = "".join(file.read_text() for file in reports.iterdir())
    assert not wrong, wrong


@contextmanager
def command(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Start it in a process group of its own, of which nothing is left at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "llm_datadist", "validate", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONSAFEPATH": "1", **environment},
    )
    try:
        yield process
        process.wait(LIMIT_S)
        wait_until(lambda: not members(process.pid), "no process is left")
    finally:
        if members(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=LIMIT_S)


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    """Run it; give its exit code and what it prints."""
    with command(*arguments, **environment) as process:
        output, _ = process.communicate(timeout=LIMIT_S)
    return process.returncode, output


def members(group: int) -> dict[int, str]:
    """Give the command lines of the living processes of a group."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            line = (folder / "cmdline").read_text()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found[int(folder.name)] = line
    return found


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not in {LIMIT_S} s: {what}"
        time.sleep(0.01)


def outcomes(report: dict[str, Any]) -> dict[str, list[str]]:
    """List the outcomes of each step."""
    return {step["name"]: [check["outcome"] for check in step["checks"]] for step in report["steps"]}


def test_a_dry_run_of_everything_on_the_fake_driver(machine, tmp_path):
    files = tmp_path / "report.json", tmp_path / "report.xml"
    arguments = ["--quick", "--conformance", "test_bfloat16", "--json", str(files[0]), "--junit", str(files[1])]
    code, output = run(*arguments, **machine)
    assert code == 0, output
    assert output.endswith("PASSED\n")
    report = json.loads(files[0].read_text())
    assert (report["passed"], report["backend"], report["devices"]) == (True, "acl", ["0", "1"])
    environment, conformance, transfers, words = report["steps"]
    assert "failed" not in outcomes(report)["environment"]
    assert {"host", "libraries", "functions", "product", "device 0", "device 1"} <= {
        check["name"] for check in environment["checks"]
    }
    assert conformance["checks"][0]["outcome"] == "ok"
    assert conformance["checks"][0]["figures"]["passed"] > 0
    link, *rows = transfers["checks"]
    assert link["name"] == "link"
    assert [row["name"] for row in rows] == ["read 16 KiB", "write 16 KiB", "read 256 KiB", "write 256 KiB"]
    for row in rows:
        assert set(row["figures"]) == {"contiguous_gb_per_s", "scattered_gb_per_s", "block_us"}
        assert min(row["figures"].values()) > 0
    assert [(fact["name"], fact["outcome"]) for fact in words["checks"]] == [("H1", "ok"), ("H2", "ok")]
    assert all(fact["figures"] == {"rounds": 20, "misses": 0} for fact in words["checks"])
    suites = ElementTree.parse(files[1]).getroot().findall("testsuite")
    assert [suite.get("name") for suite in suites] == ["environment", "conformance", "pytest", "transfers", "words"]
    assert {suite.get("failures") for suite in suites} == {"0"}
    assert suites[2].find("testcase") is not None


def test_the_simulator_needs_no_machine_and_has_no_words(tmp_path):
    file = tmp_path / "report.json"
    code, output = run(
        *("--backend", "simulator", "--only", "environment,transfers,words", "--quick", "--json", str(file))
    )
    assert code == 0, output
    report = json.loads(file.read_text())
    assert outcomes(report) == {"environment": ["skipped"], "transfers": ["ok"] * 5, "words": ["skipped"]}


def test_a_run_that_chooses_no_test_has_not_passed():
    code, output = run("--backend", "simulator", "--only", "conformance", "--conformance", "no_such_test")
    assert code == 1
    assert "failed   suite: no test was run" in output


@pytest.mark.parametrize(("which", "told"), [(0, "has ended"), (1, "exit code -9")], ids=["partner", "acting"])
def test_a_killed_process_fails_the_step(which, told):
    with command("--backend", "simulator", "--only", "transfers") as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert any("link: to" in line for line in lines)
        children = sorted(pid for pid, line in members(process.pid).items() if "spawn_main" in line)
        assert len(children) == 2
        os.kill(children[which], signal.SIGKILL)
        rest = "".join(lines)
    assert process.returncode == 1
    assert "  failed   " in rest
    assert told in rest


def test_ctrl_c_ends_all_processes():
    with command("--backend", "simulator", "--only", "transfers") as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert any("link: to" in line for line in lines)
        os.killpg(process.pid, signal.SIGINT)
        rest = "".join(lines)
    assert process.returncode == 130
    assert "Traceback" not in rest


def test_a_driver_that_refuses_a_link_fails_the_steps(machine, tmp_path):
    file = tmp_path / "report.xml"
    code, output = run(
        *("--only", "transfers,words", "--quick", "--junit", str(file)),
        **machine,
        FAKE_ASCEND_FAULTS="HcclCommPrepare:*:4",
    )
    assert code == 1
    assert "LLM_LINK_FAILED" in output
    suites = ElementTree.parse(file).getroot().findall("testsuite")
    assert [(suite.get("name"), suite.get("failures")) for suite in suites] == [("transfers", "1"), ("words", "1")]


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"LLM_DATADIST_ACL_LIBRARY": "/nowhere/libacl_rt.so"}, "failed   libraries"),
        ({"FAKE_ASCEND_FAULTS": "aclInit:1:507899"}, "failed   libraries: /"),
        ({"FAKE_ASCEND_SOC": "Ascend950PR"}, "failed   product: Ascend950PR is A5"),
        ({"FAKE_ASCEND_DEVICES": "1"}, "failed   devices 0,1: "),
        ({"FAKE_ASCEND_FAULTS": "aclrtSetDevice:1:507899"}, "failed   devices 0,1: device 0 could not be claimed"),
    ],
)
def test_what_a_machine_lacks_is_told(machine, environment, told):
    code, output = run("--only", "environment", **{**machine, **environment})
    assert code == 1
    assert told in output
    assert "to do: " in output


def test_an_older_runtime_is_told_by_what_it_lacks(tmp_path):
    acl, hccl = ascend.build(tmp_path, lacks=NEWER_THAN_8_1)
    code, output = run("--only", "environment", LLM_DATADIST_ACL_LIBRARY=str(acl), LLM_DATADIST_HCCL_LIBRARY=str(hccl))
    assert code == 1
    for name in NEWER_THAN_8_1:
        assert f"warning  functions: {name} is missing" in output
    assert "does not tell device_id: give it in llm.LocalCommRes" in output


def test_tables_tell_what_an_older_runtime_does_not(machine, tmp_path):
    """Each process gets the table of its device, here and at the peer."""
    acl, hccl = ascend.build(tmp_path, lacks=NEWER_THAN_8_1)
    older = {**machine, "LLM_DATADIST_ACL_LIBRARY": str(acl), "LLM_DATADIST_HCCL_LIBRARY": str(hccl)}
    files = [tmp_path / f"{device}.json" for device in (2, 3)]
    for device, file in zip((2, 3), files, strict=True):
        file.write_text(ascend.server("192.0.2.10", device)["llm.LocalCommRes"])
    steps = ["--quick", "--only", "environment,transfers,words"]
    code, output = run("--devices", "2,3", "--local-comm-res", f"{files[0]},{files[1]}", *steps, **older)
    assert code == 0, output
    assert "198.51.100.12" in output
    assert "198.51.100.13" in output
    address = serve_address()
    secret = {"LLM_DATADIST_SECRET": SECRET}
    serve = ["--serve", address, "--devices", "3", "--local-comm-res", str(files[1])]
    with command(*serve, **older, **secret) as serving:
        assert serving.stdout is not None
        assert f"serving at {address}" in serving.stdout.readline()
        here = ["--peer", address, "--devices", "2", "--local-comm-res", str(files[0])]
        code, output = run(*here, *steps, **older, **secret)
        assert code == 0, output
        serving.send_signal(signal.SIGINT)


def serve_address() -> str:
    """Give an address whose host no other process of the machine uses."""
    return "127.{}.{}.{}:26100".format(*(os.getpid() | 64 << 16).to_bytes(3, "big"))


def test_a_peer_of_another_host_takes_part(machine):
    address = serve_address()
    with command("--serve", address, "--devices", "3", **machine, LLM_DATADIST_SECRET=SECRET) as serving:
        assert serving.stdout is not None
        assert f"serving at {address}" in serving.stdout.readline()
        steps = ["--peer", address, "--devices", "2", "--quick", "--only"]
        code, output = run(*steps, "environment,conformance,transfers,words", **machine, LLM_DATADIST_SECRET=SECRET)
        assert code == 0, output
        assert "peer: device 3" in output
        assert "skipped  suite: it needs two devices on this host" in output
        assert f"link: to {address.replace('26100', '26101')}" in output
        assert "H2" in output
        code, output = run(*steps, "transfers", **machine, LLM_DATADIST_SECRET=f"not {SECRET}")
        assert code == 1
        assert "PermissionError" in output
        serving.send_signal(signal.SIGINT)
    assert serving.returncode == 130


def test_an_absent_peer_is_a_failure(machine):
    code, output = run("--peer", serve_address(), "--only", "transfers,words", **machine, LLM_DATADIST_SECRET=SECRET)
    assert code == 1
    assert output.count("cannot reach") == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--devices", "0"], "without --peer two processes need a device each"),
        (["--devices", "0;1"], "allowed are numbers"),
        (["--local-comm-res", "one.json"], "allowed is one file for each of --devices"),
        (["--local-comm-res", "/nowhere/a,/nowhere/b"], "No such file"),
        (["--only", "transfer"], "allowed are environment, conformance, transfers, words"),
        (["--backend", "auto"], "what is validated must be known"),
        (["--backend", "none"], "allowed are auto, acl"),
        (["--backend", "simulator", "--peer", "127.0.0.1:26000"], "links processes of one host"),
        (["--peer", "somewhere"], "allowed are ip:port"),
        (["--serve", "0.0.0.0:26000"], "addresses of one host"),
        (["--serve", "127.0.0.1:65535"], "the highest allowed is 65534"),
        (["--serve", "127.0.0.1:26000", "--peer", "127.0.0.1:26000"], "not allowed with"),
    ],
)
def test_a_wrong_argument_is_refused(arguments, told, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["validate", *arguments])
    assert caught.value.code == 2
    assert told in " ".join(capsys.readouterr().err.split())

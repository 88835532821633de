"""The parts of a validation that a whole run can't show: what it says when something is wrong."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import threading
from multiprocessing import Pipe
from xml.etree import ElementTree

import pytest
from hosts import free_address

from llm_datadist._version import __version__
from llm_datadist.validate import conformance, partner, remote, transfers, words
from llm_datadist.validate.partner import Partner, PartnerError, serve
from llm_datadist.validate.processes import checks_of
from llm_datadist.validate.report import check_lines, summary, write_junit
from llm_datadist.validate.results import Check, Outcome, Report, Step

EIGHT_BLOCKS = 8 * 4096


@pytest.fixture
def blocks():
    engine = transfers._engine(1, 2 * EIGHT_BLOCKS, None)
    made = transfers.Blocks(engine.cache_manager, 8, 4096, None)
    yield made
    made.free()
    engine.finalize()


def test_every_wrong_byte_is_counted(blocks):
    blocks.fill(7)
    assert blocks.wrong(7, "contiguous") == 0
    blocks._tensors[1][5, 100] ^= 1
    blocks._manager.swap_blocks(blocks._host, blocks.cache, {5: 5})
    assert blocks.wrong(7, "contiguous") == 1
    assert blocks.wrong(8, "contiguous") > EIGHT_BLOCKS
    assert blocks.wrong(7, "scattered") > EIGHT_BLOCKS
    blocks.clear()
    assert blocks.wrong(7, "contiguous") > EIGHT_BLOCKS


def test_scattered_blocks_are_all_blocks_and_no_neighbours_on_both_sides():
    for count in (16, 128, 2048):
        sources, destinations = transfers.order("scattered", count)
        assert sorted(sources) == sorted(destinations) == list(range(count))
        pairs = list(zip(sources, destinations, strict=True))
        merged = sum(b[0] == a[0] + 1 and b[1] == a[1] + 1 for a, b in itertools.pairwise(pairs))
        assert merged <= 1


def test_wrong_bytes_after_a_transfer_fail_the_check():
    check = transfers._measure_direction(
        "read 4 KiB", 1, 8, transfers.QUICK, lambda sources, destinations: None, lambda: None, lambda **_: 3
    )
    assert check.outcome is Outcome.FAILED
    assert check.text.startswith("3 of ")


def test_a_word_that_is_old_is_a_fact_and_no_failure():
    fact = words._fact("H1", "it is seen", lambda word, value: value - (value == 7), range(1, 11))
    assert fact.outcome is Outcome.WARNING
    assert fact.text == "it is seen: did not hold in 1 of 10 rounds, first 6 instead of 7"
    assert fact.figures == {"rounds": 10, "misses": 1}


def test_a_partner_answers_what_it_can_not_do_and_ends_with_the_other():
    ours, theirs = Pipe()
    thread = threading.Thread(target=serve, args=(theirs, None))
    thread.start()
    partner = Partner(ours)
    for what, arguments, told in (
        ("no such thing", {}, "KeyError"),
        ("allocate", {"blocks": 1, "block_bytes": 1}, "no engine listens yet"),
        ("listen", {"cache_bytes": 1 << 40}, "cache_bytes is 1099511627776, allowed are 1 to"),
        ("store", {"word": 64, "value": 1}, "no memory is open yet"),
        ("store", {"value": 1}, "TypeError"),
    ):
        with pytest.raises(PartnerError, match=told):
            partner.ask(what, **arguments)
    ours.close()
    thread.join(30)
    assert not thread.is_alive()
    theirs.close()
    with pytest.raises(PartnerError, match="has ended"):
        partner.ask("hello")


def test_a_process_that_stops_within_a_message_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(partner, "LIMIT_S", 0.5)
    for half in (b"\0", b"\0\0\0\x09[1,"):
        ours, theirs = Pipe()
        with ours, theirs:
            os.write(theirs.fileno(), half)
            with pytest.raises(PartnerError, match="stopped within an answer"):
                Partner(ours)
        ours, theirs = Pipe()
        with ours, theirs:
            os.write(ours.fileno(), half)
            serve(theirs, None)


def test_a_process_that_does_not_read_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(partner, "LIMIT_S", 0.5)
    ours, theirs = Pipe()
    with ours, theirs:
        theirs.send_bytes(json.dumps(["", __version__]).encode())
        acting = Partner(ours)

        def fill() -> None:
            for _ in range(1000):
                acting.start("store", text="x" * 60000)

        with pytest.raises(PartnerError, match="did not read"):
            fill()


def test_serving_ends_when_nobody_comes(monkeypatch, capsys):
    monkeypatch.setattr(remote, "SERVE_LIMIT_S", 0.1)
    remote.serve_at(free_address(), {})
    assert "nobody came" in capsys.readouterr().out


def test_a_partner_of_another_version_is_refused():
    ours, theirs = Pipe()
    with ours, theirs:
        theirs.send_bytes(b'["", "99.0"]')
        with pytest.raises(PartnerError, match=r"version 99\.0"):
            Partner(ours)


def test_a_process_that_hangs_is_ended():
    before = set(multiprocessing.active_children())
    checks = list(checks_of("time:sleep", {}, 1, 3600))
    assert [(check.outcome, check.text) for check in checks] == [(Outcome.FAILED, "did not end within 1 s")]
    assert not set(multiprocessing.active_children()) - before


def test_a_process_that_ends_itself_is_a_failure_also_with_code_0():
    checks = list(checks_of("os:_exit", {}, 60, 0))
    assert [(check.outcome, check.text) for check in checks] == [(Outcome.FAILED, "ended too early, with exit code 0")]


def test_a_process_that_raises_is_a_failure():
    checks = list(checks_of("json:loads", {}, 60, "{"))
    assert len(checks) == 1
    assert checks[0].outcome is Outcome.FAILED
    assert checks[0].text.startswith("JSONDecodeError")


def test_an_installed_package_says_that_it_has_no_tests(monkeypatch, tmp_path):
    monkeypatch.setattr(conformance, "_ROOT", tmp_path)
    step = Step("conformance")
    conformance.run_suite(step, "simulator", ["0", "1"], "")
    assert [check.outcome for check in step.checks] == [Outcome.FAILED]
    assert "source checkout" in step.checks[0].remedy


def test_a_suite_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(conformance, "LIMIT_S", 0.1)
    step = Step("conformance")
    conformance.run_suite(step, "simulator", ["0", "1"], "")
    assert step.checks[0].text.startswith("pytest did not end within")


def test_counts_of_a_run_name_what_failed_and_why_others_were_skipped():
    junit = """<testsuites><testsuite name="pytest">
        <testcase classname="a" name="one"/><testcase classname="a" name="two"><failure message="no"/></testcase>
        <testcase classname="a" name="three"><skipped message="needs a backend with late_regions=True"/></testcase>
        </testsuite></testsuites>"""
    suite, skipped = conformance._counted(junit, 1)
    assert suite.outcome is Outcome.FAILED
    assert suite.text == "1 failure, 1 passed, 1 skipped (pytest's code 1): a.two"
    assert skipped.text == "1 tests: needs a backend with late_regions=True"


def test_a_report_holds_what_a_driver_said_whatever_it_was(tmp_path):
    steps = [Step("words", [Check("H1", Outcome.FAILED, "bad\x00 <bytes>\x1b[0m", "mend it")], 1.5)]
    report = Report("0", "acl", ["0"], "", steps)
    assert check_lines(steps[0].checks[0]).endswith("to do: mend it")
    assert summary(report).endswith("1.5 s  1 failed\nFAILED")
    write_junit(report, tmp_path / "report.xml")
    failure = ElementTree.parse(tmp_path / "report.xml").getroot().find("testsuite/testcase/failure")
    assert failure is not None
    assert failure.text == "bad? <bytes>?[0m\nmend it"

"""What the tests of the fake driver do with it: functions, and the way they are run, each in a process of its own."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple


class Scene(NamedTuple):
    """A function, the environment that it needs, and the ids that must be recorded in the end."""

    play: Callable[..., None]
    records: frozenset[str]
    environment: dict[str, str]
    fresh: bool


SCENES: dict[str, Scene] = {}
MODULES = ("acl_scenes", "hccl_scenes", "process_scenes")


def mistake(*ids: str, fresh: bool = False, **environment: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """
    Name the ids that this function provokes: these and no others must be recorded.

    It gets the driver, initialised and with device 0 current; with `fresh`, one that is only loaded.
    """

    def add(play: Callable[..., None]) -> Callable[..., None]:
        SCENES[play.__name__] = Scene(play, frozenset(ids), environment, fresh)
        return play

    return add


# What a caller may do, though it isn't always a success: nothing is recorded.
allowed = mistake


def in_thread(function: Callable[..., Any], *arguments: object) -> Any:
    """Give what a function returns on another thread, or raise what it raises."""
    return together((function, arguments))[0]


def together(*calls: tuple[Callable[..., Any], Iterable[object]]) -> list[Any]:
    """Run functions on threads of their own at the same time and give what they return."""
    results: list[Any] = [None] * len(calls)
    failures: list[BaseException] = []

    def run(index: int) -> None:
        function, arguments = calls[index]
        try:
            results[index] = function(*arguments)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a thread is stuck"
    if failures:
        raise failures[0]
    return results


def equal(found: object, expected: object) -> None:
    """Fail with both values when they differ."""
    assert found == expected, f"{found!r}, expected {expected!r}"


def main(acl: str, hccl: str, name: str) -> None:
    """Play one scene."""
    from driver import Driver

    for module in MODULES:
        importlib.import_module(module)
    scene = SCENES[name]
    os.environ.update(scene.environment)
    if scene.play.__module__ == "process_scenes":
        scene.play(lambda: Driver(Path(acl), Path(hccl)))
        return
    driver = Driver(Path(acl), Path(hccl))
    if not scene.fresh:
        driver.start()
    scene.play(driver)
    found = driver.violations()
    assert {line.split()[0] for line in found} == scene.records, f"recorded: {found}, expected: {set(scene.records)}"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.modules["scenes"] = sys.modules["__main__"]
    try:
        main(*sys.argv[1:])
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        # Not an exit: what is left behind on the way would only be recorded on top.
        os._exit(1)

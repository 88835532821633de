"""A process that changes a directory without pause, for tests of its readers. Usage: FD NBYTES.

Everything published follows from its generation, so a reader can tell a record that is mixed from two. It ends when its
standard input does, and prints how often it has rebuilt the index.
"""

from __future__ import annotations

import itertools
import os
import select
import sys

from windows import SharedWindow

from llm_datadist._engine.directory import REQUEST, W_EPOCH, Directory, Entry, Key, record_of
from llm_datadist._kernels import words
from llm_datadist._kernels.records import Record

INCARNATION = 77
CHANGING = 64
LASTING = 16


def record_for(generation: int, ident: int) -> Record:
    """Make the one record that a generation and a key stand for."""
    tensors = generation % 7 + 1
    slots = generation % 3 + 1
    pairs = tuple((generation * 3 + i, generation * 5 + i) for i in range(tensors))
    keys = tuple((ident + i, generation) for i in range(slots))
    return record_of(
        generation, ident, generation % 16, 1, tensors, slots, slots * (generation % 1000 + 1), pairs, keys
    )


def fields_of(generation: int) -> tuple[int, int]:
    """Give slot and tags of an entry."""
    return generation * 11 % 2**64, generation * 13 % 2**64


def main() -> None:
    """Publish, withdraw, publish anew."""
    shared = SharedWindow(int(sys.argv[2]), int(sys.argv[1]))
    directory = Directory(shared.window, INCARNATION)
    generations = itertools.count(1 << 40, 2)

    def publish(ident: int) -> tuple[int, Entry, Record]:
        (number,) = directory.take_entries(1)
        record = record_for(next(generations), ident)
        at = directory.write_record(record)
        generation = next(generations)
        entry = Entry(number, generation, at, *fields_of(generation), record.generation)
        directory.publish(number, Key(REQUEST, ident, 1), entry)
        return number, entry, record

    for ident in range(LASTING):
        publish(1000 + ident)
    print("ready", flush=True)
    live: dict[int, tuple[int, Entry, Record]] = {}
    for step in itertools.count():
        ident = step * 7 % CHANGING
        if ident in live:
            number, entry, record = live.pop(ident)
            directory.retire_record(entry.record, record.generation)
            directory.withdraw(number, Key(REQUEST, ident, 1), entry.generation)
            directory.free_record(entry.record, record)
        else:
            live[ident] = publish(ident)
        # A key that comes once uses an index word up, so the index is rebuilt again and again.
        number, entry, record = publish(10**6 + step)
        directory.retire_record(entry.record, record.generation)
        directory.withdraw(number, Key(REQUEST, 10**6 + step, 1), entry.generation)
        directory.free_record(entry.record, record)
        if step % 256 == 0 and select.select([sys.stdin], [], [], 0)[0]:
            break
    print(words.load(shared.window.address + W_EPOCH) // 2, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()

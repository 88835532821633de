"""Engines in processes of their own: calls made there, what both sides share, and tables of rows."""

import argparse
import ctypes
import multiprocessing
import os
import signal
import sys
import time
import traceback
from types import SimpleNamespace

import numpy as np

from llm_datadist import CacheDesc, DataType, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole, LLMStatusCode

LIMIT_S = 600


class Process:
    """A fresh process that runs functions of this one's modules: function(state, *arguments), state being its own."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.pid = self._process.pid

    def start(self, function, *arguments):
        self._pipe.send((function, arguments))

    def result(self):
        if not self._pipe.poll(LIMIT_S):
            raise TimeoutError(f"process {self.pid} gave no answer in {LIMIT_S} s")
        good, value = self._pipe.recv()
        if not good:
            raise RuntimeError(f"process {self.pid}: {value}")
        return value

    def call(self, function, *arguments):
        self.start(function, *arguments)
        return self.result()

    def halt(self):
        """Stop it as SIGSTOP does: it listens, and never answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._pipe.close()
        if self._process.is_alive():
            os.kill(self.pid, signal.SIGCONT)
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe):
    state = SimpleNamespace()
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, function(state, *arguments))
        except Exception:
            answer = (False, traceback.format_exc())
        pipe.send(answer)


# ---------------------------------------------------------------- what runs in such a process


def engine(state, role, cluster_id, listen=None, **settings):
    """Start this process's engine; `settings` are properties of LLMConfig."""
    config = LLMConfig()
    config.device_id = 0
    config.sync_kv_timeout = 60000
    if listen:
        config.listen_ip_info = listen
    for name, value in settings.items():
        setattr(config, name, value)
    state.dd = LLMDataDist(role, cluster_id)
    state.dd.init(config.generate_options())
    state.manager = state.dd.cache_manager if config.enable_cache_manager else state.dd.kv_cache_manager


def address(cluster_id):
    """Where a cluster of this run listens: a name that the simulator makes of it and the run's namespace."""
    return f"10.0.{cluster_id // 250}.{cluster_id % 250}:26000"


def link(dd, cluster_ids, timeout_ms=LIMIT_S * 1000):
    """Link to clusters; gives seconds, and the statuses."""
    peers = []
    for cluster_id in cluster_ids:
        ip, port = address(cluster_id).split(":")
        peer = LLMClusterInfo()
        peer.remote_cluster_id = cluster_id
        peer.append_local_ip_info("10.9.9.9", 26000)
        peer.append_remote_ip_info(ip, int(port))
        peers.append(peer)
    begin = time.perf_counter()
    status, statuses = dd.link_clusters(peers, timeout_ms)
    return time.perf_counter() - begin, {status, *statuses}


def must_link(dd, cluster_ids):
    seconds, statuses = link(dd, cluster_ids)
    if statuses != {LLMStatusCode.LLM_SUCCESS}:
        raise RuntimeError(f"link_clusters gave {statuses}")
    return seconds


def become(state, make, *arguments):
    """Keep an object in this process, for `ask`."""
    state.made = make(*arguments)


def ask(state, name, *arguments):
    """Call a method of what the process has become."""
    return getattr(state.made, name)(*arguments)


def decoder(state, cluster_ids):
    """Be a decoder that is linked to these clusters."""
    engine(state, LLMRole.DECODER, 999)
    return must_link(state.dd, cluster_ids)


def bytes_desc(tensors, blocks, block_bytes):
    return CacheDesc(tensors, [blocks, block_bytes], DataType.DT_UINT8)


def tensors_of(cache):
    """The tensors of a cache of 8-bit numbers, each an array of its words."""
    addresses = cache.per_device_tensor_addrs[0] if hasattr(cache, "per_device_tensor_addrs") else cache.tensor_addrs
    return [words_at(each, cache.cache_desc.size) for each in addresses]


def words_at(where, nbytes):
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(where), np.uint64)


def first_word(salt, tensor):
    """Words of a tensor count up from here, so that no two words of a run are equal."""
    return np.uint64((salt << 48) + (tensor << 32))


def fill(tensors, salt):
    count = np.arange(len(tensors[0]), dtype=np.uint64)
    for number, words in enumerate(tensors):
        np.add(count, first_word(salt, number), out=words)


def check(tensors, salt):
    count = np.arange(len(tensors[0]), dtype=np.uint64)
    for number, words in enumerate(tensors):
        if not np.array_equal(words, count + first_word(salt, number)):
            raise RuntimeError(f"tensor {number} has wrong data")


# ---------------------------------------------------------------- what both scripts do


def say(text):
    print(text, file=sys.stderr, flush=True)


def setup():
    """Have the engines of this run, in whatever process, meet no others."""
    os.environ["LLM_DATADIST_BACKEND"] = "simulator"
    os.environ.setdefault("LLM_DATADIST_NAMESPACE", f"bench-{os.getpid()}")


def table(title, rows):
    """Print rows of equal keys."""
    cells = [list(rows[0]), *([f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}")
    for line in cells:
        first, *others = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        print("  " + "  ".join([first.strip().ljust(widths[0]), *others]), flush=True)


def run_sections(sections, short):
    """Run functions of `short`, by name; print and give their rows."""
    setup()
    results = {}
    for name, section in sections.items():
        say(f"{name} ...")
        rows = results[name] = section(short)
        table(f"{name}: {section.__doc__}", rows)
    return results


def main(sections, doc):
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="section", help=f"of {', '.join(sections)}; default all")
    parser.add_argument("--short", action="store_true", help="few rounds, to see where one stands")
    given = parser.parse_args()
    unknown = set(given.sections) - set(sections)
    if unknown:
        parser.error(f"no such section: {', '.join(sorted(unknown))}")
    run_sections({name: sections[name] for name in given.sections or sections}, given.short)

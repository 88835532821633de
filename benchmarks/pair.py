"""A peer in a process of its own, that does what it is asked, and the memory that both sides fill and check."""

import contextlib
import json
import multiprocessing as mp
import os
import statistics
import time
import traceback

import cbuild
import numpy as np
from peers import Rows

LIMIT_S = 120
ADDRESS, PORT = "192.168.7.1", 26000


def setup() -> None:
    """Have all engines of this run, in this process and in its children, meet nobody else's."""
    os.environ["LLM_DATADIST_BACKEND"] = "simulator"
    os.environ.setdefault("LLM_DATADIST_NAMESPACE", f"bench-{os.getpid()}")


def engine(role, cluster, port=None, pool=None, **fields):
    """Make an engine that listens (given a port), with a pool of some bytes (CacheManager mode only)."""
    from llm_datadist import LLMConfig, LLMDataDist

    config = LLMConfig()
    config.device_id = 0
    config.sync_kv_timeout = 60000
    if port:
        config.listen_ip_info = f"{ADDRESS}:{port}"
    if pool:
        config.mem_pool_cfg = json.dumps({"memory_size": pool})
    for name, value in fields.items():
        setattr(config, name, value)
    made = LLMDataDist(role, cluster)
    made.init(config.generate_options())
    return made


def link(mine, cluster, port):
    from llm_datadist import LLMClusterInfo, LLMStatusCode

    peer = LLMClusterInfo()
    peer.remote_cluster_id = cluster
    peer.append_local_ip_info("192.168.7.2", PORT)
    peer.append_remote_ip_info(ADDRESS, port)
    ret, rets = mine.link_clusters([peer], 10000)
    if ret != LLMStatusCode.LLM_SUCCESS:
        raise RuntimeError(f"link_clusters: {ret} {rets}")


class Blocks:
    """Tensors at some addresses as blocks, each word of which tells where it belongs."""

    def __init__(self, addresses, count, nbytes, salt=0):
        self.addresses, self.count, self.bytes, self.salt = list(addresses), count, nbytes, salt
        self.words = Rows(self.addresses, count, nbytes)
        self.inner = np.arange(nbytes // 8, dtype=np.uint64)

    def first(self, tensor, block):
        return np.uint64(((self.salt << 16) + tensor * self.count + block + 1) << 32)

    def fill(self):
        for t in range(len(self.addresses)):
            for b in range(self.count):
                np.add(self.inner, self.first(t, b), out=self.words[t, b])

    def wipe(self, blocks):
        """Forget both edges of some blocks."""
        for t in range(len(self.addresses)):
            self.words[t][blocks, 0] = 0
            self.words[t][blocks, -1] = 0

    def has(self, blocks, of, source, every_word=False):
        """Say whether these blocks hold those blocks of another: both edges, or every word."""
        for t in range(len(self.addresses)):
            first = np.array([source.first(t, b) for b in of])
            rows = self.words[t]
            if (rows[blocks, 0] != first).any() or (rows[blocks, -1] != first + self.inner[-1]).any():
                return False
            if every_word and any((rows[b] != self.inner + f).any() for b, f in zip(blocks, first)):
                return False
        return True


class Peer:
    """A process in which an object does what it is asked by the name of its method."""

    def __init__(self, make, *arguments):
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self.process.start()
        theirs.close()
        self.answer()

    def ask(self, name, *arguments):
        self.pipe.send((name, arguments))
        return self.answer()

    def answer(self):
        if not self.pipe.poll(LIMIT_S):
            raise RuntimeError(f"the peer gave no answer in {LIMIT_S} s")
        good, value = self.pipe.recv()
        if not good:
            raise RuntimeError(value)
        return value

    def end(self):
        """Let it end by itself; what does not is killed."""
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.process.join(10)
        self.process.kill()
        self.process.join()


def _serve(pipe, make, arguments):
    try:
        served = make(*arguments)
        pipe.send((True, None))
        while (asked := pipe.recv()) is not None:
            name, given = asked
            pipe.send((True, getattr(served, name)(*given)))
    except EOFError:
        pass
    except Exception:  # whatever it is, the one who asked is told, and ends the run
        pipe.send((False, traceback.format_exc(limit=6)))


class Loop:
    """The machine's limit: the best plain copy loop in C, over the same lists."""

    def __init__(self, threads=2):
        self.lib = cbuild.load()
        found = cbuild.kernels(self.lib)
        self.name = next(name for name in ("avx512_nt_list", "avx2_nt_list", "memcpy") if name in found)
        self.kernel, self.threads = found[self.name], threads
        self.held = []

    def copy(self, source, destination, source_list, destination_list, tensors=slice(None)):
        """Copy blocks of every tensor, or of some."""
        here, there = (np.array(x.addresses[tensors], np.uint64) for x in (destination, source))
        d, s = (np.array(x, np.int64) for x in (destination_list, source_list))
        sizes = len(here), d.ctypes.data, s.ctypes.data, len(d), source.bytes, self.threads
        result = self.lib.pull(self.kernel, 0, here.ctypes.data, there.ctypes.data, *sizes)
        if result:
            raise OSError(-result, os.strerror(-result))

    def memory(self, tensors, count, nbytes, salt=0):
        """Give shared memory of small pages, as any other process would map it."""
        memory = cbuild.Mem(self.lib, "shm", tensors * count * nbytes, populate=True)
        self.held.append(memory)
        return Blocks([memory.addr + t * count * nbytes for t in range(tensors)], count, nbytes, salt)


def timed(call, *arguments):
    """Seconds of a call."""
    began = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - began


def quantile(values, q):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def ratio(base, other):
    """The median over rounds of how much faster one is than the other."""
    return statistics.median(b / o for b, o in zip(base, other))


def table(title, rows):
    """Print rows of equal keys."""
    print(f"\n{title}")
    if not rows:
        return
    cells = [[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    widths = [max(len(c) for c in column) for column in zip(rows[0], *cells)]
    for line in (list(rows[0]), *cells):
        print("  " + "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))))

"""What the examples share: two processes with a pipe between them, and short ways to make an engine and a link.

The pipe stands for whatever a serving system tells its processes: which request, which blocks, and "go".
"""

import ctypes
import multiprocessing
import os

import numpy as np

from llm_datadist import LLMClusterInfo, LLMConfig, LLMDataDist, LLMStatusCode

LIMIT_S = 60


def engine(role, cluster_id, **settings):
    """Make and initialise an engine; `settings` are properties of `LLMConfig`."""
    config = LLMConfig()
    config.device_id = 0
    for name, value in settings.items():
        setattr(config, name, value)
    made = LLMDataDist(role, cluster_id)
    made.init(config.generate_options())
    return made


def peer(cluster_id, address):
    """Describe the cluster that listens at this ``ip:port``."""
    info = LLMClusterInfo()
    info.remote_cluster_id = cluster_id
    info.append_local_ip_info("192.168.1.9", 26000)
    ip, port = address.split(":")
    info.append_remote_ip_info(ip, int(port))
    return info


def link(made, *peers):
    """Link to peers. `link_clusters` does not raise, so look at what it returns."""
    status, each = made.link_clusters(list(peers), timeout=10000)
    assert status == LLMStatusCode.LLM_SUCCESS, each


def array(address, shape, dtype=np.float16):
    """Show the memory of one tensor as a numpy array; valid until the cache is deallocated."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_uint8 * count).from_address(address), dtype).reshape(shape)


def run(prompt, decoder):
    """Run both sides, each in a process of its own, and end with an error if one of them fails."""
    # Addresses are names in a namespace: this run meets no other engine of this host.
    os.environ.setdefault("LLM_DATADIST_NAMESPACE", f"example-{os.getpid()}")
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    sides = [context.Process(target=prompt, args=(here,)), context.Process(target=decoder, args=(there,))]
    for side in sides:
        side.start()
    here.close()
    there.close()
    for side in sides:
        side.join(LIMIT_S)
    for side in sides:
        side.kill()
        side.join()
    if any(side.exitcode for side in sides):
        raise SystemExit("a side of the example has failed; the first traceback above says why")

"""Move blocks of a waiting request to host memory, and back."""

import numpy as np
from both import array, engine, link, peer, run

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, KvCache, LLMRole, Placement

ADDRESS = "192.168.1.1:26000"
DEVICE = CacheDesc(2, [8, 64], DataType.DT_FLOAT16)
HOST = CacheDesc(2, [100, 64], DataType.DT_FLOAT16, Placement.HOST)  # more blocks, of the same size


def prompt(pipe):
    made = engine(LLMRole.PROMPT, 1, listen_ip_info=ADDRESS)
    cache = made.kv_cache_manager.allocate_blocks_cache(DEVICE, BlocksCacheKey(1))
    for address in cache.per_device_tensor_addrs[0]:
        array(address, DEVICE.shape)[:] = np.arange(8)[:, None]
    pipe.send("filled")
    pipe.recv()
    made.finalize()


def decoder(pipe):
    made = engine(LLMRole.DECODER, 2)
    manager = made.kv_cache_manager
    device = manager.allocate_blocks_cache(DEVICE)
    on_host = [np.zeros(HOST.shape, np.float16) for _ in range(HOST.num_tensors)]
    host = KvCache.create_cpu_cache(HOST, [tensor.ctypes.data for tensor in on_host])
    pipe.recv()
    link(made, peer(1, ADDRESS))
    manager.pull_blocks(BlocksCacheKey(1), device, [5, 6], [0, 1])

    manager.swap_blocks(device, host, {0: 90, 1: 91})  # out: the request waits
    manager.pull_blocks(BlocksCacheKey(1), device, [2, 3], [0, 1])  # another one uses its blocks
    manager.swap_blocks(host, device, {90: 6, 91: 7})  # in: where there is room now
    print([int(number) for number in array(device.per_device_tensor_addrs[0][1], DEVICE.shape)[:, 0]])
    pipe.send("done")
    made.finalize()


if __name__ == "__main__":
    run(prompt, decoder)

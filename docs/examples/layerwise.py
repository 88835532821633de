"""Send each layer to the decoder as soon as it is computed, by key (`CacheManager` mode)."""

import threading

import numpy as np
from both import engine, link, peer, run

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LayerSynchronizer, LLMRole, TransferWithCacheKeyConfig

ADDRESS = "192.168.1.2:26000"  # here the decoder listens
LAYERS = 4
PAGED = CacheDesc(2 * LAYERS, [8, 64], DataType.DT_FLOAT)
MODE = {"enable_cache_manager": True, "enable_remote_cache_accessible": True}


class Computed(LayerSynchronizer):
    """One event a layer; on a device it would be an event of the stream."""

    def __init__(self):
        self.events = [threading.Event() for _ in range(LAYERS)]

    def synchronize_layer(self, layer_index, timeout_in_millis):
        return self.events[layer_index].wait(30)  # False: the layer failed


def prompt(pipe):
    made = engine(LLMRole.PROMPT, 1, **MODE)
    manager = made.cache_manager
    tensors = [np.zeros(PAGED.shape, np.float32) for _ in range(PAGED.num_tensors)]
    cache = manager.register_blocks_cache(PAGED, tensors, BlocksCacheKey(1, 0))
    pipe.recv()
    link(made, peer(2, ADDRESS))

    computed = Computed()
    to = TransferWithCacheKeyConfig(BlocksCacheKey(2, 0), range(LAYERS), range(LAYERS))
    task = manager.transfer_cache_async(cache, computed, [to], [0, 1], [6, 7])
    for layer in range(LAYERS):
        for tensor in tensors[2 * layer : 2 * layer + 2]:
            tensor[:2] = layer + 1  # the model
        computed.events[layer].set()
    results = task.get_results(timeout_in_millis=30000)  # one for each configuration

    # The same by hand, for one layer: returns when its bytes are there.
    tensors[6][2], tensors[7][2] = 40, 41
    manager.push_blocks(BlocksCacheKey(2, 0), cache, [2], [5], range(3, 4), range(3, 4))
    pipe.send(results)
    pipe.recv()
    made.finalize()


def decoder(pipe):
    made = engine(LLMRole.DECODER, 2, listen_ip_info=ADDRESS, **MODE)
    tensors = [np.zeros(PAGED.shape, np.float32) for _ in range(PAGED.num_tensors)]
    # Before the link, else the memory is not reachable for the peer.
    made.cache_manager.register_blocks_cache(PAGED, tensors, BlocksCacheKey(2, 0))
    pipe.send("listening")
    print(pipe.recv())
    print([int(tensor[6, 0]) for tensor in tensors], int(tensors[6][5, 0]), int(tensors[7][5, 63]))
    pipe.send("done")
    made.finalize()


if __name__ == "__main__":
    run(prompt, decoder)

"""Send each layer to the decoder as soon as it is computed, by address (`KvCacheManager` mode)."""

import threading

from both import array, engine, link, peer, run

from llm_datadist import CacheDesc, DataType, LayerSynchronizer, LLMRole, TransferConfig

ADDRESS = "192.168.1.1:26000"
LAYERS = 4
PAGED = CacheDesc(2 * LAYERS, [8, 64], DataType.DT_FLOAT16)


class Computed(LayerSynchronizer):
    """One event a layer; on a device it would be an event of the stream."""

    def __init__(self):
        self.events = [threading.Event() for _ in range(LAYERS)]

    def synchronize_layer(self, layer_index, timeout_in_millis):
        return self.events[layer_index].wait(30)  # False: the layer failed


def prompt(pipe):
    made = engine(LLMRole.PROMPT, 1, listen_ip_info=ADDRESS)
    manager = made.kv_cache_manager
    cache = manager.allocate_blocks_cache(PAGED)
    pipe.send("listening")
    addresses = pipe.recv()  # the decoder's, two for each layer

    computed = Computed()
    task = manager.transfer_cache_async(cache, computed, [TransferConfig(2, addresses)], [0, 1], [6, 7])
    tensors = [array(address, PAGED.shape) for address in cache.per_device_tensor_addrs[0]]
    for layer in range(LAYERS):
        for tensor in tensors[2 * layer : 2 * layer + 2]:
            tensor[:2] = layer + 1  # the model
        computed.events[layer].set()
    pipe.send(task.synchronize(timeout_in_millis=30000))
    pipe.recv()
    made.finalize()


def decoder(pipe):
    made = engine(LLMRole.DECODER, 2)
    pipe.recv()
    link(made, peer(1, ADDRESS))
    cache = made.kv_cache_manager.allocate_blocks_cache(PAGED)
    addresses = cache.per_device_tensor_addrs[0]
    pipe.send(addresses)
    print(pipe.recv(), [int(array(address, PAGED.shape)[7, 0]) for address in addresses])
    pipe.send("done")
    made.finalize()


if __name__ == "__main__":
    run(prompt, decoder)

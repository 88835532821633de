"""Pull the blocks of a request, and only those that the decoder does not have yet."""

from both import array, engine, link, peer, run

from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, DataType, LLMRole

ADDRESS = "192.168.1.1:26000"
TOKENS, WIDTH = 16, 8  # of a block
PAGED = CacheDesc(4, [32, TOKENS, WIDTH], DataType.DT_FLOAT16)  # 2 layers of K and V, 32 blocks
NONE = 2**64 - 1  # no request


def prompt(pipe):
    made = engine(LLMRole.PROMPT, 1, listen_ip_info=ADDRESS)
    manager = made.kv_cache_manager
    paged = manager.allocate_blocks_cache(PAGED, BlocksCacheKey(1, model_id=0))
    tensors = [array(address, PAGED.shape) for address in paged.per_device_tensor_addrs[0]]

    def compute(blocks):
        for tensor in tensors:
            for block in blocks:
                tensor[block] = block

    # Both requests start with the same system prompt, whose two blocks are 3 and 7 here.
    compute([3, 7, 1, 9])
    # Tell of a request only now: a peer can read the cache from its allocation on, filled or not.
    pipe.send({"request 1": [3, 7, 1], "request 2": [3, 7, 9]})

    # The same for contiguous caches is a prefix key: any number of pulls, until it is removed.
    system = CacheKey(1, req_id=NONE, prefix_id=5)
    prefix = manager.allocate_cache(CacheDesc(4, [1, 2 * TOKENS * WIDTH], DataType.DT_FLOAT16), [system])
    array(prefix.per_device_tensor_addrs[0][0], [2 * TOKENS * WIDTH])[:] = 5
    pipe.send("prefix")
    pipe.recv()
    manager.remove_cache_key(system)
    made.finalize()


def decoder(pipe):
    made = engine(LLMRole.DECODER, 2)
    manager = made.kv_cache_manager
    requests = pipe.recv()
    link(made, peer(1, ADDRESS))  # it listens by now
    paged = manager.allocate_blocks_cache(PAGED)
    free = list(range(32))
    cached = {}  # block of the prompt -> block here. A real one goes by a hash of the tokens.
    for name, blocks in requests.items():
        missing = [block for block in blocks if block not in cached]
        places = [free.pop() for _ in missing]
        manager.pull_blocks(BlocksCacheKey(1, model_id=0), paged, missing, places)
        cached.update(zip(missing, places, strict=True))
        key = array(paged.per_device_tensor_addrs[0][0], PAGED.shape)
        print(name, "pulled", missing, "and has", [int(key[cached[block], 0, 0]) for block in blocks])

    pipe.recv()
    slots = manager.allocate_cache(CacheDesc(4, [2, 2 * TOKENS * WIDTH], DataType.DT_FLOAT16))
    for slot in range(2):
        manager.pull_cache(CacheKey(1, req_id=NONE, prefix_id=5), slots, batch_index=slot)
    print("prefix in both slots:", array(slots.per_device_tensor_addrs[0][0], [2, 2 * TOKENS * WIDTH])[:, 0])
    pipe.send("done")
    made.finalize()


if __name__ == "__main__":
    run(prompt, decoder)

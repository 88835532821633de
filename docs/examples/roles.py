"""Let a prompt and a decoder change places, with their caches."""

from both import array, engine, link, peer, run

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMConfig, LLMRole

HERE, THERE = "192.168.1.1:26000", "192.168.1.2:26000"
PAGED = CacheDesc(2, [8, 64], DataType.DT_FLOAT16)


def first(pipe):
    made = engine(LLMRole.PROMPT, 1, listen_ip_info=HERE, enable_switch_role=True)
    manager = made.kv_cache_manager
    cache = manager.allocate_blocks_cache(PAGED, BlocksCacheKey(1))
    tensor = array(cache.per_device_tensor_addrs[0][0], PAGED.shape)
    tensor[:] = 1
    pipe.send("filled")

    pipe.recv()  # pulled, and unlinked
    made.switch_role(LLMRole.DECODER)
    pipe.recv()  # the other one listens
    link(made, peer(2, THERE))
    manager.pull_blocks(BlocksCacheKey(2), cache, [0], [7])
    print("block 7 came back as", int(tensor[7, 0]))
    pipe.send("done")
    made.finalize()


def second(pipe):
    made = engine(LLMRole.DECODER, 2, enable_switch_role=True)
    manager = made.kv_cache_manager
    # Role DECODER may not bind keys.
    pulled = manager.allocate_blocks_cache(PAGED)
    pipe.recv()
    link(made, peer(1, HERE))
    manager.pull_blocks(BlocksCacheKey(1), pulled, [0], [0])
    made.unlink_clusters([peer(1, HERE)], timeout=5000)  # a role can't change while links stand

    config = LLMConfig()
    config.listen_ip_info = THERE
    made.switch_role(LLMRole.PROMPT, config.generate_options())
    pipe.send("unlinked")
    served = manager.allocate_blocks_cache(PAGED, BlocksCacheKey(2))
    # What was pulled before the switch is still there.
    for old, new in zip(pulled.per_device_tensor_addrs[0], served.per_device_tensor_addrs[0], strict=True):
        array(new, PAGED.shape)[0] = array(old, PAGED.shape)[0] + 1
    pipe.send("listening")
    pipe.recv()
    made.finalize()


if __name__ == "__main__":
    run(first, second)

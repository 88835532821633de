"""Pull caches with one tensor a layer, and caches whose tensors have different widths (MLA)."""

from both import array, engine, link, peer, run

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMRole

ADDRESS = "192.168.1.1:26000"
LAYERS, BLOCKS, TOKENS = 61, 8, 16
# Tensors of a cache are equal. So the latent and the rotary part are a cache each, and each gets a key of its own:
# the model id tells them apart.
LATENT = CacheDesc(LAYERS, [BLOCKS, TOKENS, 512], DataType.DT_BF16)
ROTARY = CacheDesc(LAYERS, [BLOCKS, TOKENS, 64], DataType.DT_BF16)
PARTS = [(LATENT, BlocksCacheKey(1, model_id=0)), (ROTARY, BlocksCacheKey(1, model_id=1))]


def prompt(pipe):
    made = engine(LLMRole.PROMPT, 1, listen_ip_info=ADDRESS)
    caches = [made.kv_cache_manager.allocate_blocks_cache(desc, key) for desc, key in PARTS]
    for part, cache in enumerate(caches):
        for layer, tensor in enumerate(cache.per_device_tensor_addrs[0]):
            array(tensor, [BLOCKS, TOKENS, cache.cache_desc.shape[2]])[:] = 100 * part + layer
    pipe.send("filled")
    pipe.recv()
    made.finalize()


def decoder(pipe):
    made = engine(LLMRole.DECODER, 2)
    manager = made.kv_cache_manager
    pipe.recv()
    link(made, peer(1, ADDRESS))
    for desc, key in PARTS:
        cache = manager.allocate_blocks_cache(desc)
        manager.pull_blocks(key, cache, [1, 2], [3, 4])  # all 61 layers
        # Ranges count layers, so they need to know how many tensors make one.
        manager.pull_blocks(
            key,
            cache,
            [5],
            [0],
            src_layer_range=range(60, 61),
            dst_layer_range=range(1),
            tensor_num_per_layer=1,
        )
        tensors = [array(address, [BLOCKS, TOKENS, desc.shape[2]]) for address in cache.per_device_tensor_addrs[0]]
        print(desc.shape[2], "wide: layer 60 has", int(tensors[60][4, 0, 0]), "and layer 0", int(tensors[0][0, 0, 0]))
    pipe.send("done")
    made.finalize()


if __name__ == "__main__":
    run(prompt, decoder)

"""Pull the right KV heads when prompt and decoder are split over different numbers of ranks."""

from both import array, engine, link, peer, run

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMRole

HEADS, TOKENS, WIDTH, BLOCKS = 8, 16, 128, 32
PROMPT_RANKS, DECODER_RANKS, RANK = 4, 8, 3  # this example runs one rank of each


def heads_of(rank, ranks):
    """Give the KV heads of a rank; with more ranks than heads, several ranks have the same one."""
    if ranks >= HEADS:
        return [rank * HEADS // ranks]
    count = HEADS // ranks
    return list(range(rank * count, (rank + 1) * count))


def described(ranks):
    """Describe a rank's paged cache, laid out as [block, head, token, width]. A piece is one head of one block."""
    heads = len(heads_of(0, ranks))
    return CacheDesc(4, [BLOCKS * heads, TOKENS, WIDTH], DataType.DT_FLOAT16)


def pieces(blocks, rank, ranks, wanted):
    """Give the pieces that hold these heads, block after block."""
    mine = heads_of(rank, ranks)
    return [block * len(mine) + mine.index(head) for block in blocks for head in wanted]


def sources(rank, ranks, prompt_ranks):
    """Say which prompt ranks hold the heads of a decoder rank, and which of its heads each holds."""
    found = {}
    for head in heads_of(rank, ranks):
        owner = next(r for r in range(prompt_ranks) if head in heads_of(r, prompt_ranks))
        found.setdefault(owner, []).append(head)
    return found


def address(rank):
    return f"192.168.1.{1 + rank}:26000"


((OWNER, WANTED),) = sources(RANK, DECODER_RANKS, PROMPT_RANKS).items()


def prompt(pipe):
    made = engine(LLMRole.PROMPT, 100 + OWNER, listen_ip_info=address(OWNER))
    desc = described(PROMPT_RANKS)
    cache = made.kv_cache_manager.allocate_blocks_cache(desc, BlocksCacheKey(100 + OWNER))
    mine = heads_of(OWNER, PROMPT_RANKS)
    for tensor in cache.per_device_tensor_addrs[0]:
        by_head = array(tensor, [BLOCKS, len(mine), TOKENS, WIDTH])
        for place, head in enumerate(mine):
            by_head[:, place] = head
    pipe.send("filled")
    pipe.recv()
    made.finalize()


def decoder(pipe):
    made = engine(LLMRole.DECODER, 200 + RANK)
    cache = made.kv_cache_manager.allocate_blocks_cache(described(DECODER_RANKS))
    pipe.recv()
    for owner, wanted in sources(RANK, DECODER_RANKS, PROMPT_RANKS).items():
        link(made, peer(100 + owner, address(owner)))
        source = pieces([4, 9], owner, PROMPT_RANKS, wanted)
        destination = pieces([0, 1], RANK, DECODER_RANKS, wanted)
        made.kv_cache_manager.pull_blocks(BlocksCacheKey(100 + owner), cache, source, destination)
        print(f"head {wanted} from rank {owner}: pieces {source} to {destination}")
    mine = heads_of(RANK, DECODER_RANKS)
    by_head = array(cache.per_device_tensor_addrs[0][3], [BLOCKS, len(mine), TOKENS, WIDTH])
    print("heads in blocks 0 and 1:", [[int(head) for head in block] for block in by_head[:2, :, 0, 0]])
    pipe.send("done")
    made.finalize()


if __name__ == "__main__":
    run(prompt, decoder)

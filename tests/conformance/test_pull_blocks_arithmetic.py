"""Which bytes of which blocks go where."""

from pairs import Decoder, Prompt, bytes_desc

from llm_datadist import BlocksCacheKey, CacheDesc, DataType


def test_s54_blocks_land_one_by_one(linked: tuple[Prompt, Decoder]) -> None:
    """S-50, S-54: the worked example, every byte compared."""
    prompt, decoder = linked
    source = CacheDesc(2, [10, 32], DataType.DT_FLOAT16)
    prompt.allocate_blocks(source, BlocksCacheKey(1, 0))
    cache = decoder.allocate(CacheDesc(2, [6, 32], DataType.DT_FLOAT16), blocks=True)
    decoder.manager.pull_blocks(BlocksCacheKey(1, 0), cache, [0, 5], [2, 3])
    decoder.check(
        cache,
        {t: [(128, prompt.expected(source, t)[0:64]), (192, prompt.expected(source, t)[320:384])] for t in range(2)},
    )


def test_s50_last_of_a_repeated_destination_wins(linked: tuple[Prompt, Decoder]) -> None:
    """S-50: of a repeated destination the last pair counts, and a repeated source is fine."""
    prompt, decoder = linked
    desc = bytes_desc(2, 8, 512)
    prompt.allocate_blocks(desc, BlocksCacheKey(1, 0))
    cache = decoder.allocate(desc, blocks=True)
    decoder.manager.pull_blocks(BlocksCacheKey(1, 0), cache, [1, 1, 2, 3], [0, 5, 0, 0])
    decoder.check(
        cache,
        {
            t: [(0, prompt.expected(desc, t)[1536:2048]), (5 * 512, prompt.expected(desc, t)[512:1024])]
            for t in range(2)
        },
    )

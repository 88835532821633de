"""What the fixtures run inside a shared peer."""

import gc

from llm_datadist import LLMDataDist


def reset() -> None:
    """Finalize whatever the last test left."""
    instance = LLMDataDist.llm_engine_instance
    if instance is not None:
        instance.finalize()
    gc.collect()

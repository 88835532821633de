"""What prompt and decoder agree on beforehand: address, cluster id and keys."""

from llm_datadist import BlocksCacheKey, CacheKey

__all__ = ["BULK", "PAGED", "PROMPT_CLUSTER", "PROMPT_IP", "PROMPT_PORT", "REQUEST"]

PROMPT_CLUSTER = 1
# The address of a device on a real machine; on the simulator it is a name, and no network port is opened.
PROMPT_IP = "192.168.1.1"
PROMPT_PORT = 26000

REQUEST = CacheKey(PROMPT_CLUSTER, req_id=1)
PAGED = BlocksCacheKey(PROMPT_CLUSTER, model_id=0)
BULK = BlocksCacheKey(PROMPT_CLUSTER, model_id=1)

"""A script as it is written for devices: two hosts, their addresses, the names of the first generation."""

import argparse
import ctypes

from llm_datadist_v1 import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
)

PROMPT_IP, DECODER_IP, PORT = "192.168.1.1", "192.168.1.2", 26000
DESC = CacheDesc(num_tensors=4, shape=[10, 128], data_type=DataType.DT_FLOAT16)


def init(role, cluster_id, device_id):
    config = LLMConfig()
    config.device_id = device_id
    if role == LLMRole.PROMPT:
        config.listen_ip_info = f"{PROMPT_IP}:{PORT}"
    datadist = LLMDataDist(role, cluster_id)
    datadist.init(config.generate_options())
    return datadist


def run_prompt(device_id):
    datadist = init(LLMRole.PROMPT, 1, device_id)
    cache = datadist.kv_cache_manager.allocate_blocks_cache(DESC, BlocksCacheKey(1, 0))
    for i, address in enumerate(cache.per_device_tensor_addrs[0]):
        ctypes.memset(address, ord("a") + i, DESC.size)
    input("filled, press Enter when the decoder is done\n")
    datadist.finalize()


def run_decoder(device_id):
    datadist = init(LLMRole.DECODER, 2, device_id)
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = 1
    cluster.append_local_ip_info(DECODER_IP, PORT)
    cluster.append_remote_ip_info(PROMPT_IP, PORT)
    status, _ = datadist.link_clusters([cluster], 5000)
    if status != LLMStatusCode.LLM_SUCCESS:
        raise SystemExit(f"link failed: {status}")
    manager = datadist.kv_cache_manager
    cache = manager.allocate_blocks_cache(DESC)
    try:
        manager.pull_blocks(BlocksCacheKey(1, 0), cache, [0, 1], [2, 3])
    except LLMException as e:
        raise SystemExit(f"pull failed: {e.status_code}") from e
    print([ctypes.string_at(address + 2 * 256, 3) for address in cache.per_device_tensor_addrs[0]])
    datadist.unlink_clusters([cluster], 5000)
    datadist.finalize()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["prompt", "decoder"])
    parser.add_argument("--device_id", type=int, default=0)
    arguments = parser.parse_args()
    (run_prompt if arguments.role == "prompt" else run_decoder)(arguments.device_id)

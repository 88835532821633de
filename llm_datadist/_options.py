"""From the options of `LLMDataDist.init` to a checked, frozen `EngineConfig`. Opens nothing but the secret's file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeGuard

from llm_datadist._addresses import Address, canonical_host, parse_address
from llm_datadist._checks import INT32_MAX, UINT16_MAX, UINT32_MAX, check_dict, refused, typed
from llm_datadist._enums import LLMRole
from llm_datadist._secret import read_secret
from llm_datadist.status import LLMException, LLMStatusCode, ParamInvalid

DEFAULT_SYNC_TIMEOUT_MS = 1000
DEFAULT_PAGE_SHIFT = 16
DEFAULT_MEM_UTILIZATION = 0.95
DEFAULT_COPY_THREADS = 2
#: Lowest and highest number of attempts of a rank-table link.
LINK_RETRY_COUNTS = (1, 100)
PAGE_SHIFTS = (10, 30)

CACHE_MANAGER = "llm.EnableCacheManager"
REMOTE_ACCESSIBLE = "llm.EnableRemoteCacheAccessible"
SWITCH_ROLE = "llm.EnableSwitchRole"
LISTEN = "llm.listenIpInfo"
DEVICES = "ge.exec.deviceId"
CLUSTER_INFO = "llm.ClusterInfo"
LOCAL_COMM_RES = "llm.LocalCommRes"
TRANSFER_BACKEND = "llm.TransferBackend"
MEMORY_LIMIT = "ge.flowGraphMemMaxSize"
#: Only a variable, not an option: a program must not decide it for who runs it.
ALLOW_INSECURE = "LLM_DATADIST_ALLOW_INSECURE"

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Size of a memory pool in bytes, and of its pages as a power of two."""

    memory_size: int
    page_shift: int


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All that the engine is told by its user, checked."""

    role: LLMRole
    cluster_id: int
    #: CacheManager mode, else KvCacheManager mode.
    cache_manager: bool
    #: Peers access caches one-sided and by id only; CacheManager mode only.
    remote_accessible: bool
    devices: tuple[int, ...]
    #: Where to listen; empty for a pure client.
    listen: tuple[Address, ...]
    sync_timeout_ms: int
    #: Bytes of all KV memory per device, None for no limit; KvCacheManager mode only.
    memory_limit: int | None
    #: `switch_role` is possible; KvCacheManager mode only.
    switch_role: bool
    #: CacheManager mode only.
    device_pool: PoolConfig | None
    host_pool: PoolConfig | None
    #: 0 means the transport's default.
    link_total_time_s: int
    link_retry_count: int
    #: "hixl" or None.
    transfer_backend: str | None
    #: None means not given, which is not the same as empty.
    local_comm_res: str | None
    backend: str
    #: Part of every simulator address name.
    namespace: str
    #: What peers on other hosts must know, too; None for nothing.
    secret: bytes | None = field(repr=False)
    #: Listen to other hosts also without a secret.
    allow_insecure: bool
    #: Absent ranks of a rank-table link are this process.
    loopback: bool
    copy_threads: int
    #: A copy of all options, for backends to read keys of their own.
    options: Mapping[str, str]


def parse_options(role: LLMRole, cluster_id: int, options: dict[str, str]) -> EngineConfig:
    """Check the options of `LLMDataDist.init`.

    Parameters
    ----------
    role : LLMRole
        Role of the engine.
    cluster_id : int
        Its cluster id.
    options : dict of str to str
        As `LLMConfig.generate_options` makes them, or by hand. Left unchanged. Unknown keys are ignored.

    Returns
    -------
    EngineConfig
        The checked options.

    Raises
    ------
    TypeError
        When `options` is no dict, or a key or value is not a str.
    LLMException
        LLM_PARAM_INVALID (a `ValueError` too) when a value is not allowed or a needed one is missing; LLM_FAILED when
        a flag is neither "0" nor "1".
    """
    typed("options", options, dict)
    total_memory = _total_memory(options)
    check_dict("options", options, str, str)
    merged = {**options, "llm.Role": role.name.capitalize()}

    cache_manager = _choose_manager(merged)
    transfer_backend = _transfer_backend(merged, cache_manager)
    if cache_manager:
        devices, listen = _cache_manager_ends(merged)
    else:
        devices, listen = _kv_cache_manager_ends(merged, role)
    if transfer_backend not in (None, "hixl"):
        raise refused(ParamInvalid(f"{TRANSFER_BACKEND} is {transfer_backend!r:.200}, allowed is hixl"))

    flags = {key: _flag(merged, key) for key in (CACHE_MANAGER, REMOTE_ACCESSIBLE, SWITCH_ROLE)}
    utilization = _fraction(merged, "llm.MemoryUtilization", DEFAULT_MEM_UTILIZATION)
    if not cache_manager and "llm.BufPoolCfg" in merged:
        _check_buffer_tiers(merged["llm.BufPoolCfg"])
    enforce = _switch(merged, "llm.Simulator.EnforceMemoryLimit", None, True)
    memory_limit = None
    if total_memory is not None and enforce and not cache_manager:
        memory_limit = math.floor(total_memory * utilization)
    return EngineConfig(
        role=role,
        cluster_id=cluster_id,
        cache_manager=cache_manager,
        remote_accessible=cache_manager and flags[REMOTE_ACCESSIBLE],
        devices=devices,
        listen=listen,
        sync_timeout_ms=_number(merged, "llm.SyncKvCacheWaitTime", DEFAULT_SYNC_TIMEOUT_MS, 1, INT32_MAX),
        memory_limit=memory_limit,
        switch_role=not cache_manager and flags[SWITCH_ROLE],
        device_pool=_pool(merged, "llm.MemPoolConfig") if cache_manager else None,
        host_pool=_pool(merged, "llm.HostMemPoolConfig") if cache_manager else None,
        link_total_time_s=_number(merged, "llm.LinkTotalTime", 0, 0, UINT32_MAX),
        link_retry_count=_number(merged, "llm.LinkRetryCount", 1, *LINK_RETRY_COUNTS),
        transfer_backend=transfer_backend,
        local_comm_res=merged.get(LOCAL_COMM_RES),
        backend=_backend(merged),
        namespace=os.environ.get("LLM_DATADIST_NAMESPACE", ""),
        secret=read_secret(),
        allow_insecure=_switch({}, ALLOW_INSECURE, ALLOW_INSECURE, False),
        loopback=_switch(merged, "llm.Simulator.Loopback", "LLM_DATADIST_LOOPBACK", False),
        copy_threads=_copy_threads(merged),
        options=MappingProxyType(merged),
    )


def _is_digits(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _total_memory(options: dict[str, str]) -> int | None:
    if MEMORY_LIMIT not in options:
        return None
    text = typed(MEMORY_LIMIT, options[MEMORY_LIMIT], str)
    if not _is_digits(text) or len(text) > 19:
        raise refused(ParamInvalid(f"{MEMORY_LIMIT} is {text!r:.200}, allowed is one number of bytes below 10**19"))
    return int(text)


def _choose_manager(options: dict[str, str]) -> bool:
    """Fill in what communication resources imply, and tell whether it is CacheManager mode."""
    if LOCAL_COMM_RES in options:
        options.setdefault(CACHE_MANAGER, "1")
        options.setdefault(REMOTE_ACCESSIBLE, "1")
    cache_manager = options.get(CACHE_MANAGER) == "1"
    if LOCAL_COMM_RES in options and not cache_manager:
        raise refused(
            ParamInvalid(f"{CACHE_MANAGER} is {options[CACHE_MANAGER]!r:.200}, allowed is 1 with {LOCAL_COMM_RES}")
        )
    return cache_manager


def _transfer_backend(options: dict[str, str], cache_manager: bool) -> str | None:
    """Check what a transfer backend needs, and give its name."""
    if TRANSFER_BACKEND not in options:
        return None
    if not cache_manager:
        raise refused(ParamInvalid(f"{TRANSFER_BACKEND} needs {CACHE_MANAGER} to be 1"))
    options.setdefault(REMOTE_ACCESSIBLE, "1")
    if options[REMOTE_ACCESSIBLE] != "1":
        raise refused(
            ParamInvalid(
                f"{REMOTE_ACCESSIBLE} is {options[REMOTE_ACCESSIBLE]!r:.200}, allowed is 1 with {TRANSFER_BACKEND}"
            )
        )
    if LISTEN not in options:
        raise refused(ParamInvalid(f"{TRANSFER_BACKEND} needs {LISTEN}"))
    return options[TRANSFER_BACKEND]


def _cache_manager_ends(options: dict[str, str]) -> tuple[tuple[int, ...], tuple[Address, ...]]:
    listen = (parse_address(LISTEN, options[LISTEN]),) if LISTEN in options else ()
    devices = _devices(options)
    if len(devices) != 1:
        raise refused(
            ParamInvalid(f"{DEVICES} is {options[DEVICES]!r:.200}, allowed is one device with {CACHE_MANAGER}")
        )
    return devices, listen


def _kv_cache_manager_ends(options: dict[str, str], role: LLMRole) -> tuple[tuple[int, ...], tuple[Address, ...]]:
    """Only a PROMPT listens, at one address per device."""
    if CLUSTER_INFO in options:
        listen = _cluster_info_listen(options[CLUSTER_INFO])
        devices = _devices(options) if DEVICES in options else tuple(range(max(1, len(listen))))
    else:
        devices = _devices(options)
        listen = ()
        if role is LLMRole.PROMPT:
            if LISTEN not in options:
                raise refused(ParamInvalid(f"{LISTEN} is missing, a PROMPT needs one ip:port per device"))
            listen = tuple(parse_address(LISTEN, entry) for entry in options[LISTEN].split(";"))
    if role is not LLMRole.PROMPT:
        return devices, ()
    if len(listen) != len(devices):
        raise refused(ParamInvalid(f"there are {len(listen)} addresses to listen at for {len(devices)} devices"))
    return devices, listen


def _devices(options: dict[str, str]) -> tuple[int, ...]:
    if DEVICES not in options:
        raise refused(ParamInvalid(f"{DEVICES} is missing, allowed are device ids joined by ;"))
    entries = options[DEVICES].split(";")
    if not all(_is_digits(entry) and len(entry) <= 10 and int(entry) <= INT32_MAX for entry in entries):
        raise refused(
            ParamInvalid(f"{DEVICES} is {options[DEVICES]!r:.200}, allowed are 0 to {INT32_MAX}, several joined by ;")
        )
    devices = tuple(int(entry) for entry in entries)
    if len(set(devices)) != len(devices):
        raise refused(ParamInvalid(f"{DEVICES} is {options[DEVICES]!r:.200}, allowed is each device once"))
    return devices


def _cluster_info_listen(text: str) -> tuple[Address, ...]:
    entries = _json_object(CLUSTER_INFO, text).get("listen_ip_info", [])
    if not isinstance(entries, list):
        raise refused(ParamInvalid(f"listen_ip_info in {CLUSTER_INFO} is {entries!r:.200}, allowed is a list"))
    listen = []
    for entry in entries:
        ip, port = (entry.get("ip"), entry.get("port")) if isinstance(entry, dict) else (None, None)
        if not (isinstance(ip, str) or _is_unsigned(ip)) or not _is_unsigned(port) or not 0 < port <= UINT16_MAX:
            raise refused(
                ParamInvalid(
                    f"listen_ip_info in {CLUSTER_INFO} has {entry!r:.200}, allowed are ip (text, or a little-endian "
                    f"integer) and port (1 to {UINT16_MAX})"
                )
            )
        listen.append(Address(canonical_host(f"ip in {CLUSTER_INFO}", ip), port))
    return tuple(listen)


def _flag(options: dict[str, str], key: str) -> bool:
    text = options.get(key, "0")
    if text not in ("0", "1"):
        text = f"{key} is {text!r:.200}, allowed are 0 and 1"
        raise refused(LLMException(text, status_code=LLMStatusCode.LLM_FAILED))
    return text == "1"


def _number(options: dict[str, str], key: str, default: int, low: int, high: int) -> int:
    text = options.get(key)
    if text is None:
        return default
    if not _is_digits(text) or len(text) > 19 or not low <= int(text) <= high:
        raise refused(ParamInvalid(f"{key} is {text!r:.200}, allowed are {low} to {high}"))
    return int(text)


def _fraction(options: dict[str, str], key: str, default: float) -> float:
    text = options.get(key)
    if text is None:
        return default
    try:
        fraction = float(text)
    except ValueError:
        fraction = math.nan
    if not 0 <= fraction <= 1:
        raise refused(ParamInvalid(f"{key} is {text!r:.200}, allowed are 0 to 1"))
    return fraction


def _json_object(name: str, text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise refused(ParamInvalid(f"{name} is not JSON: {e}")) from e
    if not isinstance(value, dict):
        raise refused(ParamInvalid(f"{name} is {text!r:.200}, allowed is a JSON object"))
    return value


def _is_unsigned(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _pool(options: dict[str, str], key: str) -> PoolConfig | None:
    if key not in options:
        return None
    pool = _json_object(key, options[key])
    memory_size, page_shift = pool.get("memory_size"), pool.get("page_shift", DEFAULT_PAGE_SHIFT)
    low, high = PAGE_SHIFTS
    if not _is_unsigned(page_shift) or not low <= page_shift <= high:
        raise refused(ParamInvalid(f"page_shift in {key} is {page_shift!r:.200}, allowed are {low} to {high}"))
    if not _is_unsigned(memory_size) or not 1 <= memory_size >> page_shift < UINT32_MAX:
        raise refused(
            ParamInvalid(
                f"memory_size in {key} is {memory_size!r:.200}, allowed are 1 to {UINT32_MAX - 1} pages "
                f"of {1 << page_shift} bytes"
            )
        )
    return PoolConfig(memory_size, page_shift)


def _check_buffer_tiers(text: str) -> None:
    """Check the buffer tiers. Nothing needs them here, but a wrong description is an error everywhere."""
    key = "llm.BufPoolCfg"
    tiers = _json_object(key, text).get("buf_cfg")
    if not isinstance(tiers, list):
        raise refused(ParamInvalid(f"buf_cfg in {key} is {tiers!r:.200}, allowed is a list"))
    largest = 0
    for tier in tiers:
        fields = tier if isinstance(tier, dict) else {}
        total, block, buffer = (fields.get(name) for name in ("total_size", "blk_size", "max_buf_size"))
        if not (
            _is_unsigned(total)
            and _is_unsigned(block)
            and _is_unsigned(buffer)
            and 0 < block <= 2 * _MIB
            and block & (block - 1) == 0
            and total <= UINT32_MAX
            and total % (2 * _MIB) == 0
            and total % block == 0
            and block <= buffer < total
            and buffer > largest
        ):
            raise refused(
                ParamInvalid(
                    f"buf_cfg in {key} has {tier!r:.200}, allowed are total_size (a multiple of 2 MiB and of blk_size, "
                    f"at most {UINT32_MAX}), blk_size (a power of two up to 2 MiB) and max_buf_size (from blk_size to "
                    f"below total_size, here above {largest})"
                )
            )
        largest = buffer


# --- switches of our own ----------------------------------------------------------------------------------------


def _own(options: dict[str, str], key: str, variable: str | None) -> tuple[str, str | None]:
    """Give the name and value of a switch: the option, else the environment variable, which is unset when empty."""
    if key in options or variable is None:
        return key, options.get(key)
    return variable, os.environ.get(variable) or None


def _switch(options: dict[str, str], key: str, variable: str | None, default: bool) -> bool:
    name, text = _own(options, key, variable)
    if text is None:
        return default
    if text not in ("0", "1"):
        raise refused(ParamInvalid(f"{name} is {text!r:.200}, allowed are 0 and 1"))
    return text == "1"


def _backend(options: dict[str, str]) -> str:
    name, text = _own(options, "llm.Backend", "LLM_DATADIST_BACKEND")
    if text == "":
        raise refused(ParamInvalid(f"{name} is empty, allowed are auto, simulator, acl and installed backends"))
    return text or "auto"


def _copy_threads(options: dict[str, str]) -> int:
    """Give the threads of one large copy: never more than the processors that the process may use."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    name, text = _own(options, "llm.CopyThreads", "LLM_DATADIST_COPY_THREADS")
    wanted = DEFAULT_COPY_THREADS if text is None else _number({name: text}, name, DEFAULT_COPY_THREADS, 1, UINT16_MAX)
    return min(wanted, processors)

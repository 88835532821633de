"""Configuration: what users set."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, overload

from llm_datadist._addresses import canonical_host, little_endian
from llm_datadist._checks import (
    INT32_MAX,
    UINT16_MAX,
    UINT32_MAX,
    any_integer,
    check_dict,
    check_isinstance,
    integer,
    integer_within,
    refused,
    typed,
    uint32,
    uint64,
)
from llm_datadist._enums import LLMRole
from llm_datadist._options import DEFAULT_MEM_UTILIZATION, LINK_RETRY_COUNTS
from llm_datadist.status import ParamInvalid

__all__ = [
    "LLMClusterInfo",
    "LLMConfig",
    "LLMRole",
    "LlmConfig",
    "trans_str_ip",
]

T = TypeVar("T")


def trans_str_ip(ip: str | int) -> int:
    """Turn an IPv4 address into an integer.

    Parameters
    ----------
    ip : str or int
        The address.

    Returns
    -------
    int
        Its four bytes, read as a little-endian integer. An integer is returned unchanged.

    Raises
    ------
    RuntimeError
        When the text is no IPv4 address (an LLMException with LLM_PARAM_INVALID).
    TypeError
        When `ip` is neither text nor integer.
    """
    check_isinstance("ip", ip, [str, int], allow_none=False)
    if isinstance(ip, int):
        return ip
    number = little_endian(canonical_host("ip", ip))
    if isinstance(number, str):
        raise refused(ParamInvalid(f"ip is {ip!r}, allowed are IPv4 addresses"))
    return number


class LLMClusterInfo:
    """Names a peer and the addresses of both ends of the link to it, for `link_clusters`."""

    def __init__(self) -> None:
        self._remote_cluster_id: int | None = None
        self._remote_role_type: LLMRole | int | None = None
        self._local: list[tuple[int | str, int]] = []
        self._remote: list[tuple[int | str, int]] = []

    @property
    def remote_cluster_id(self) -> int | None:
        """The peer's cluster id, in [0, 2**64); None until it is set."""
        return self._remote_cluster_id

    @remote_cluster_id.setter
    def remote_cluster_id(self, value: int) -> None:
        self._remote_cluster_id = uint64("remote_cluster_id", value)

    @property
    def remote_role_type(self) -> LLMRole | int | None:
        """The peer's role; optional."""
        return self._remote_role_type

    @remote_role_type.setter
    def remote_role_type(self, value: LLMRole | int) -> None:
        self._remote_role_type = any_integer("remote_role_type", value)

    @property
    def local_ip_info_list(self) -> list[tuple[int | str, int]]:
        """Local (ip, port) pairs: IPv4 as little-endian integer, IPv6 as text."""
        return self._local

    @property
    def remote_ip_info_list(self) -> list[tuple[int | str, int]]:
        """The peer's (ip, port) pairs, in the same form."""
        return self._remote

    def append_local_ip_info(self, ip: str | int, port: int) -> None:
        """Add an address of this end.

        Parameters
        ----------
        ip : str or int
            IPv4 or IPv6 text, or an IPv4 address as little-endian integer.
        port : int
            In [0, 65535].

        Raises
        ------
        TypeError
            When an argument has another type.
        ValueError
            When an integer is out of range.
        RuntimeError
            When the text is no IP address (an LLMException with LLM_PARAM_INVALID).
        """
        self._local.append(_ip_info(ip, port))

    def append_remote_ip_info(self, ip: str | int, port: int) -> None:
        """Add an address of the peer's end; otherwise like `append_local_ip_info`."""
        self._remote.append(_ip_info(ip, port))

    def __repr__(self) -> str:
        return (
            f"LLMClusterInfo(remote_cluster_id={self._remote_cluster_id}, "
            f"local_ip_info_list={self._local}, remote_ip_info_list={self._remote})"
        )


def _ip_info(ip: str | int, port: int) -> tuple[int | str, int]:
    check_isinstance("ip", ip, [str, int], allow_none=False)
    if not isinstance(ip, str):
        any_integer("ip", ip)
    integer("port", port, 0, UINT16_MAX)
    return little_endian(canonical_host("ip", ip)), port


class _Setting(Generic[T]):
    """One property of `LLMConfig`: checks what is assigned, keeps it as it is, and turns it into options.

    Parameters
    ----------
    check : callable
        Given name and value; raises when the value is not allowed.
    default : object
        What the getter gives while nothing is set. Only where it is None may None be assigned.
    emit : callable
        Given a value that was set, gives the options for it.
    doc : str
        The property's documentation.
    """

    def __init__(
        self,
        check: Callable[[str, Any], object],
        default: T,
        emit: Callable[[Any], Mapping[str, str]],
        doc: str,
    ) -> None:
        self._check = check
        self._default = default
        self.emit = emit
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, config: None, owner: type) -> _Setting[T]: ...
    @overload
    def __get__(self, config: LLMConfig, owner: type) -> T: ...
    def __get__(self, config: LLMConfig | None, owner: type) -> _Setting[T] | T:
        if config is None:
            return self
        value: T | None = self.stored(config)
        return self._default if value is None else value

    def __set__(self, config: LLMConfig, value: T) -> None:
        if value is not None or self._default is not None:
            self._check(self._name, value)
        setattr(config, f"_{self._name}", value)

    def stored(self, config: LLMConfig) -> T | None:
        """Give what was assigned, None if nothing was."""
        value: T | None = getattr(config, f"_{self._name}", None)
        return value


def _check_text(name: str, value: object) -> None:
    typed(name, value, str)


def _check_flag(name: str, value: object) -> None:
    typed(name, value, bool)


def _check_ge_options(name: str, value: dict[str, str]) -> None:
    check_dict(name, value, str, str)


def _check_devices(name: str, value: object) -> None:
    if not isinstance(value, (list, tuple)):
        _check_device(name, value)
        return
    if not value:
        raise refused(ParamInvalid(f"{name} is empty, allowed are one or more devices"))
    for position, element in enumerate(value):
        _check_device(f"{name}[{position}]", element)


def _check_device(name: str, value: object) -> None:
    if any_integer(name, value) < 0:
        raise refused(ParamInvalid(f"{name} is {value}, allowed are 0 to {INT32_MAX}"))
    integer(name, value, 0, INT32_MAX)


def _check_timeout(name: str, value: object) -> None:
    if isinstance(value, str):
        if not (value.isascii() and value.isdigit()):
            raise refused(ParamInvalid(f"{name} is {value!r:.200}, allowed are 1 to {INT32_MAX} ms"))
        value = int(value)
    if any_integer(name, value) <= 0:
        raise refused(ParamInvalid(f"{name} is {value}, allowed are 1 to {INT32_MAX} ms"))
    integer(name, value, 1, INT32_MAX)


def _check_mem_utilization(name: str, value: object) -> None:
    fraction = typed(name, value, float)
    if not 0 <= fraction <= 1:
        raise refused(ParamInvalid(f"{name} is {fraction}, allowed are 0.0 to 1.0"))


def _check_link_total_time(name: str, value: object) -> None:
    integer_within(name, value, 0, UINT32_MAX)


def _check_link_retry_count(name: str, value: object) -> None:
    integer_within(name, value, *LINK_RETRY_COUNTS)


def _check_cluster_info(name: str, value: object) -> None:
    text = typed(name, value, str)
    try:
        json.loads(text)
    except json.JSONDecodeError as e:
        raise refused(json.JSONDecodeError(f"{name} is not JSON: {e.msg}", e.doc, e.pos)) from e


def _emit_devices(device_id: int | list[int] | tuple[int, ...]) -> dict[str, str]:
    devices = [device_id] if isinstance(device_id, int) else device_id
    return {"ge.exec.deviceId": ";".join(map(str, devices)), "ge.session_device_id": str(devices[0])}


def _emit_cluster_info(text: str) -> dict[str, str]:
    cluster_info = json.loads(text)
    for entry in cluster_info.get("listen_ip_info", ()) if isinstance(cluster_info, dict) else ():
        if isinstance(entry, dict) and isinstance(entry.get("ip"), str):
            entry["ip"] = little_endian(canonical_host("cluster_info ip", entry["ip"]))
    return {"llm.ClusterInfo": json.dumps(cluster_info)}


def _emit(key: str) -> Callable[[object], dict[str, str]]:
    return lambda value: {key: str(value)}


def _emit_filled(key: str) -> Callable[[str], dict[str, str]]:
    return lambda text: {key: text} if text else {}


def _emit_flag(key: str) -> Callable[[bool], dict[str, str]]:
    return lambda flag: {key: "1" if flag else "0"}


class LLMConfig:
    """Collects settings and turns them into the options for `LLMDataDist.init`.

    Notes
    -----
    A property gives back what was assigned to it, as it was. Each checks on assignment and raises `TypeError` for
    another type, `ValueError` for an integer that does not fit its width, and LLMException with LLM_PARAM_INVALID
    (a `ValueError` too) for a value that is not allowed. Not safe for use from several threads.
    """

    def __init__(self) -> None:
        #: What `generate_options` fills and returns.
        self.options: dict[str, str] = {}
        self.ge_options = {}
        self.mem_utilization = DEFAULT_MEM_UTILIZATION

    ge_options = _Setting[dict[str, str]](
        _check_ge_options, {}, dict, "Options passed on as they are; all others win over them."
    )
    device_id = _Setting["int | list[int] | tuple[int, ...] | None"](
        _check_devices, None, _emit_devices, "The device, or several (KvCacheManager only), each in [0, 2**31)."
    )
    sync_kv_timeout = _Setting["int | str | None"](
        _check_timeout,
        None,
        _emit("llm.SyncKvCacheWaitTime"),
        "Time limit of one transfer in ms, in [1, 2**31), as integer or digits; None means 1000.",
    )
    deploy_res_path = _Setting[str](
        _check_text, "", _emit_filled("llm.deployResPath"), "Path of deployment resources; has no effect."
    )
    listen_ip_info = _Setting[str](
        _check_text,
        "",
        _emit_filled("llm.listenIpInfo"),
        "Where to listen: ``ip:port`` or ``[ipv6]:port``, one per device joined by ``;``.",
    )
    buf_pool_cfg = _Setting[str](
        _check_text, "", _emit_filled("llm.BufPoolCfg"), "Buffer tiers as JSON (KvCacheManager); checked only."
    )
    mem_pool_cfg = _Setting[str](
        _check_text,
        "",
        _emit_filled("llm.MemPoolConfig"),
        'Device pool (CacheManager) as JSON: ``{"memory_size": bytes, "page_shift": 10 to 30, default 16}``.',
    )
    host_mem_pool_cfg = _Setting[str](
        _check_text, "", _emit_filled("llm.HostMemPoolConfig"), "Host pool (CacheManager), like `mem_pool_cfg`."
    )
    enable_cache_manager = _Setting[bool](
        _check_flag, False, _emit_flag("llm.EnableCacheManager"), "Whether to use CacheManager, not KvCacheManager."
    )
    enable_remote_cache_accessible = _Setting[bool](
        _check_flag,
        False,
        _emit_flag("llm.EnableRemoteCacheAccessible"),
        "Whether peers access caches directly (CacheManager); needed for pushes.",
    )
    enable_switch_role = _Setting[bool](
        _check_flag,
        False,
        lambda flag: {"llm.EnableSwitchRole": "1"} if flag else {},
        "Whether `switch_role` is possible (KvCacheManager).",
    )
    mem_utilization = _Setting[float](
        _check_mem_utilization,
        DEFAULT_MEM_UTILIZATION,
        _emit("llm.MemoryUtilization"),
        "Usable fraction of ``ge.flowGraphMemMaxSize``, a float in [0, 1].",
    )
    link_total_time = _Setting[int](
        _check_link_total_time,
        0,
        _emit("llm.LinkTotalTime"),
        "Time limit of a rank-table link in s, in [0, 2**32); 0 means the transport's default.",
    )
    link_retry_count = _Setting[int](
        _check_link_retry_count, 1, _emit("llm.LinkRetryCount"), "Attempts of a rank-table link, in [1, 100]."
    )
    rdma_traffic_class = _Setting["int | None"](
        uint32, None, _emit("llm.RdmaTrafficClass"), "RDMA traffic class, in [0, 2**32); None means the default."
    )
    rdma_service_level = _Setting["int | None"](
        uint32, None, _emit("llm.RdmaServiceLevel"), "RDMA service level, in [0, 2**32); None means the default."
    )
    local_comm_res = _Setting[str](
        _check_text,
        "",
        _emit("llm.LocalCommRes"),
        "Local communication resources as JSON; also when empty it chooses CacheManager with remote access.",
    )
    transfer_backend = _Setting[str](
        _check_text, "", _emit("llm.TransferBackend"), 'Transfer backend; the only one known is ``"hixl"``.'
    )
    global_resource_config = _Setting[str](
        _check_text, "", _emit("llm.GlobalResourceConfig"), "Global resources as JSON; has no effect."
    )
    cluster_info = _Setting[str](
        _check_cluster_info,
        "",
        _emit_cluster_info,
        "Description of this cluster as JSON (KvCacheManager), instead of `listen_ip_info`.",
    )
    output_max_size = _Setting["int | None"](
        any_integer, None, _emit("llm.OutputMaxSize"), "Largest output; has no effect."
    )

    def generate_options(self) -> dict[str, str]:
        """Turn the settings into options.

        Returns
        -------
        dict of str to str
            `options`: the same object each time. A key that was set once stays.
        """
        for setting in vars(LLMConfig).values():
            if isinstance(setting, _Setting):
                value = setting.stored(self)
                if value is not None:
                    self.options.update(setting.emit(value))
        return self.options

    def gen_options(self) -> dict[str, str]:
        """Do the same as `generate_options`."""
        return self.generate_options()


LlmConfig = LLMConfig

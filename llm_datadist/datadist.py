"""`LLMDataDist`: one member of a cluster of prompt and decoder processes. Checks arguments and calls the engine."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from llm_datadist._addresses import Address, canonical_host, parse_address
from llm_datadist._built import require_built
from llm_datadist._checks import check_dict, check_inner, check_isinstance, int32, refused, typed, uint32, uint64
from llm_datadist._log import info, warn
from llm_datadist._options import EngineConfig, parse_options
from llm_datadist.cache_types import RegisterMemStatus
from llm_datadist.configs import LLMClusterInfo, LLMRole
from llm_datadist.status import LLMException, LLMStatusCode, ParamInvalid

if TYPE_CHECKING:
    from llm_datadist._engine.engine import Engine
    from llm_datadist._engine.links import LinkRequest
    from llm_datadist.cache_manager import CacheManager
    from llm_datadist.kv_cache_manager import KvCacheManager

__all__ = ["LLMDataDist"]

LISTEN_INFO = "llm.listenIpInfo"
MAX_COMM_NAME = 127
MAX_MEMBERS = 4

#: Reentrant: a signal handler may finalize while `init` or `finalize` runs in the same thread.
_init_lock = threading.RLock()


def _renew_lock() -> None:
    """In a forked child the lock may be held by a thread that does not exist there."""
    global _init_lock
    _init_lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


class LLMDataDist:
    """One member of a set of processes that pass KV caches on.

    Parameters
    ----------
    role : LLMRole
        PROMPT computes KV and serves it, DECODER pulls it, MIX does both without the guards of a role.
    cluster_id : int
        Identity of this member in [0, 2**64); unique among all that link together.

    Raises
    ------
    TypeError
        When `role` is not an LLMRole, or `cluster_id` not an integer.
    ValueError
        When `cluster_id` does not fit 64 bits.

    Notes
    -----
    Several objects may be made, one at a time may be initialised in a process. Every member but `init`,
    `finalize` and `cluster_id` raises RuntimeError while this object is not initialised. `init` and `finalize` must not
    run at the same time as other calls.
    """

    #: The initialised instance of this process, or None.
    llm_engine_instance: ClassVar[LLMDataDist | None] = None

    def __init__(self, role: LLMRole, cluster_id: int) -> None:
        self._role = typed("role", role, LLMRole)
        self._cluster_id = uint64("cluster_id", cluster_id)
        self._is_initialized = False
        self._engine: Engine | None = None
        self._kv_cache_manager: KvCacheManager | None = None
        self._cache_manager: CacheManager | None = None

    @property
    def cluster_id(self) -> int:
        """Identity of this member."""
        return self._cluster_id

    @staticmethod
    def _role_to_str(role: LLMRole) -> str:
        return {LLMRole.PROMPT: "Prompt", LLMRole.DECODER: "Decoder", LLMRole.MIX: "Mix"}[role]

    # ------------------------------------------------------------------ lifecycle

    def init(self, options: dict[str, str]) -> None:
        """Start the engine.

        Parameters
        ----------
        options : dict of str to str
            What `LLMConfig.generate_options` gives, or the same keys by hand. It is copied.

        Raises
        ------
        TypeError
            When `options`, or a key or value, has another type.
        ValueError
            When a port is not a number.
        LLMException
            LLM_FAILED when another instance of this process is initialised or an address can't be listened at;
            LLM_FEATURE_NOT_ENABLED on another system than Linux;
            LLM_PARAM_INVALID for a wrong option (also a ValueError); LLM_DEVICE_OUT_OF_MEMORY or
            LLM_OUT_OF_MEMORY when memory is short. Nothing is left behind then, and `init` can be called again.

        Notes
        -----
        A second call on an initialised object does nothing. The exit of the interpreter finalizes.
        """
        with _init_lock:
            if self._is_initialized and not self._inherited():
                return
            other = LLMDataDist.llm_engine_instance
            if other is not None and not other._inherited():
                raise refused(
                    LLMException(
                        "another LLMDataDist is initialised in this process, and there can be one: finalize it first",
                        status_code=LLMStatusCode.LLM_FAILED,
                    )
                )
            config = parse_options(self._role, self._cluster_id, options)
            self._engine = None
            try:
                self._start(config)
                self._is_initialized = True
                LLMDataDist.llm_engine_instance = self
                atexit.register(_shutdown_handler)
            except BaseException:
                # Also what a signal handler raised after the engine had started.
                self._is_initialized = False
                if self._engine is not None:
                    self._engine.close()
                raise
        info("initialised cluster %d as %s", self._cluster_id, self._role)

    def _start(self, config: EngineConfig) -> None:
        if sys.platform != "linux":
            raise refused(
                LLMException(
                    f"init runs on Linux only, this system is {sys.platform}; the types can be used anywhere",
                    status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
                )
            )
        require_built()
        from llm_datadist._engine import codes
        from llm_datadist._engine.engine import Engine
        from llm_datadist.backend import BackendError, make_backend
        from llm_datadist.cache_manager import CacheManager
        from llm_datadist.kv_cache_manager import KvCacheManager

        try:
            backend = make_backend(config.backend)
        except BackendError as e:
            raise refused(codes.exception_of(e, config.cache_manager)) from e
        self._engine = Engine(config, backend)
        if config.cache_manager:
            self._cache_manager = CacheManager(self._engine)
        else:
            self._kv_cache_manager = KvCacheManager(self._engine, self._role)

    def finalize(self) -> None:
        """Drop all links, free all memory and stop the engine.

        Notes
        -----
        Does nothing when not initialised. Managers and caches of this engine can't be used any more; this or
        another object can be initialised afterwards. Peers find out at their next transfer.
        """
        with _init_lock:
            if not self._is_initialized:
                return
            self._is_initialized = False
            if LLMDataDist.llm_engine_instance is self:
                LLMDataDist.llm_engine_instance = None
                atexit.unregister(_shutdown_handler)
            engine, self._engine = self._engine, None
            self._kv_cache_manager = self._cache_manager = None
            if engine is not None:
                engine.close()
        info("finalized cluster %d", self._cluster_id)

    def _inherited(self) -> bool:
        """Say whether this object came into a child process by fork, where its engine does not run."""
        return self._engine is not None and self._engine.closed is not None

    def _running(self) -> Engine:
        if not self._is_initialized or self._engine is None:
            raise RuntimeError("this LLMDataDist is not initialised: call init first")
        self._engine.require_open()
        return self._engine

    # ------------------------------------------------------------------ managers

    @property
    def kv_cache_manager(self) -> KvCacheManager:
        """The manager of caches and pulls.

        Raises
        ------
        RuntimeError
            When not initialised.
        LLMException
            LLM_PARAM_INVALID in CacheManager mode.
        """
        self._running()
        if self._kv_cache_manager is None:
            raise refused(
                ParamInvalid(
                    "kv_cache_manager does not exist in CacheManager mode: "
                    'leave out llm.EnableCacheManager, or set it to "0", and init again'
                )
            )
        return self._kv_cache_manager

    @property
    def cache_manager(self) -> CacheManager:
        """The manager of caches and transfers of CacheManager mode.

        Raises
        ------
        RuntimeError
            When not initialised.
        LLMException
            LLM_PARAM_INVALID in KvCacheManager mode.
        """
        self._require_cache_manager_mode("cache_manager")
        assert self._cache_manager is not None
        return self._cache_manager

    def _require_cache_manager_mode(self, name: str) -> Engine:
        engine = self._running()
        if not engine.config.cache_manager:
            raise refused(
                ParamInvalid(f'{name} does not exist in KvCacheManager mode: set llm.EnableCacheManager to "1"')
            )
        return engine

    # ------------------------------------------------------------------ links

    def link_clusters(
        self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Link to clusters that listen.

        Parameters
        ----------
        clusters : list or tuple of LLMClusterInfo
            Each with ``remote_cluster_id`` and one remote and one local address; in KvCacheManager mode one of each
            for every device, and at most 16 clusters.
        timeout : int, default 3000
            Limit of the whole call in ms, in [1, 2**31).

        Returns
        -------
        tuple of LLMStatusCode and list of LLMStatusCode
            The overall result, and one for each cluster in order. The reasons are in the log.

            Each: LLM_SUCCESS; LLM_ALREADY_LINK; LLM_LINK_FAILED (nobody there, or refused); LLM_PARAM_INVALID (512
            links stand, or the modes differ); LLM_REPEAT_REQUEST (named before in the same call) and
            LLM_WAIT_PROCESS_TIMEOUT in KvCacheManager mode, for which CacheManager mode has LLM_ALREADY_LINK and
            LLM_TIMEOUT.

            Overall: in KvCacheManager mode LLM_LINK_FAILED if one failed or ran out of time, else LLM_SUCCESS; in
            CacheManager mode the last that is not LLM_SUCCESS, else LLM_SUCCESS. LLM_PARAM_INVALID,
            LLM_CLUSTER_NUM_EXCEED_LIMIT or LLM_PROCESSING_LINK with an empty list when the call as a whole is refused.

        Raises
        ------
        TypeError, ValueError
            For arguments of another type or width.
        LLMException
            LLM_PARAM_INVALID when `timeout` is not above 0, or a cluster has no local address (CacheManager mode).
        RuntimeError
            When not initialised.

        Notes
        -----
        Only a DECODER may call it in KvCacheManager mode, anyone in CacheManager mode, where a link carries transfers
        in both directions. A link that broke is replaced; a standing one gives LLM_ALREADY_LINK.
        """
        engine = self._running()
        timeout = _check_timeout(timeout)
        requests = _requests(clusters, needs_local=engine.config.cache_manager and not engine.config.local_comm_res)
        if not engine.config.cache_manager and self._role is not LLMRole.DECODER:
            refused(ParamInvalid(f"link_clusters is for role DECODER, this cluster's role is {self._role}"))
            return LLMStatusCode.LLM_PARAM_INVALID, []
        info("link_clusters %s, timeout %d ms", [request.cluster_id for request in requests], timeout)
        return engine.link_clusters(requests, timeout)

    def unlink_clusters(
        self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000, force: bool = False
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Unlink clusters.

        Parameters
        ----------
        clusters : list or tuple of LLMClusterInfo
            With the addresses the links were made with, or without any; in KvCacheManager mode at most 16.
        timeout : int, default 3000
            Limit of the whole call in ms, in [1, 2**31).
        force : bool, default False
            Remove only this end, without a word to the peer.

        Returns
        -------
        tuple of LLMStatusCode and list of LLMStatusCode
            One result for each cluster: LLM_SUCCESS, LLM_NOT_YET_LINK, LLM_PARAM_INVALID (linked at another address),
            LLM_LINK_BUSY, LLM_NOTIFY_PROMPT_UNLINK_FAILED (this end is removed, the peer could not be told). Overall
            LLM_UNLINK_FAILED unless each is LLM_SUCCESS or LLM_NOT_YET_LINK. In CacheManager mode: LLM_SUCCESS, also
            when not linked; LLM_PARAM_INVALID; LLM_UNLINK_FAILED (a transfer does not end, or the peer could not be
            told). Overall, and when the call as a whole is refused, as for `link_clusters`.

        Raises
        ------
        TypeError, ValueError
            For arguments of another type or width.
        LLMException
            LLM_PARAM_INVALID when `timeout` is not above 0.
        RuntimeError
            When not initialised.

        Notes
        -----
        Any role. In KvCacheManager mode a PROMPT removes its own end only. In CacheManager mode running transfers are
        waited for.
        """
        engine = self._running()
        timeout = _check_timeout(timeout)
        requests = _requests(clusters)
        typed("force", force, bool)
        info("unlink_clusters %s, timeout %d ms, force %s", [r.cluster_id for r in requests], timeout, force)
        return engine.unlink_clusters(requests, timeout, force, as_client=self._role is LLMRole.DECODER)

    def check_link_status(self, remote_cluster_id: int) -> None:
        """Ask a linked prompt cluster for a sign of life.

        Parameters
        ----------
        remote_cluster_id : int
            The peer, in [0, 2**64).

        Raises
        ------
        TypeError, ValueError
            For an id of another type or width.
        LLMException
            LLM_PARAM_INVALID for another role than DECODER or in CacheManager mode; LLM_NOT_YET_LINK when not linked or
            the link broke; LLM_LINK_BUSY during another operation on the link; LLM_WAIT_PROCESS_TIMEOUT when no answer
            came within ``sync_kv_timeout``: the peer may be busy or stopped, so ask again.
        RuntimeError
            When not initialised.
        """
        engine = self._running()
        uint64("remote_cluster_id", remote_cluster_id)
        if engine.config.cache_manager:
            raise refused(ParamInvalid("check_link_status does not exist in CacheManager mode"))
        if self._role is not LLMRole.DECODER:
            raise refused(ParamInvalid(f"check_link_status is for role DECODER, this cluster's role is {self._role}"))
        engine.check_link(remote_cluster_id)

    # ------------------------------------------------------------------ rank-table links

    def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> int:
        """Link two to four clusters that all call this with the same arguments.

        Parameters
        ----------
        comm_name : str
            Name of the set, 1 to 127 characters.
        cluster_rank_info : dict of int to int
            Rank of each cluster, ascending, with the own cluster in it. Ids are in [0, 2**64), ranks in [0, 2**32).
        rank_table : str
            JSON text of a rank table, version 1.0 or 1.2.

        Returns
        -------
        int
            Id of the communicator, from 1. The links are made in the background: ask `query_register_mem_status`.

        Raises
        ------
        TypeError, ValueError
            For arguments of another type or width.
        LLMException
            LLM_PARAM_INVALID (also a ValueError) in KvCacheManager mode, for what is outside of the above, or with 512
            communicators; LLM_LINK_FAILED for a table that is no JSON; LLM_FEATURE_NOT_ENABLED with transfer backend
            hixl.
        RuntimeError
            When not initialised.

        Notes
        -----
        The members have ``link_total_time`` seconds (120 by default) to come. May be called from any thread.
        """
        engine = self._require_cache_manager_mode("link")
        typed("comm_name", comm_name, str)
        if not 1 <= len(comm_name) <= MAX_COMM_NAME:
            raise refused(ParamInvalid(f"comm_name has {len(comm_name)} characters, allowed are 1 to {MAX_COMM_NAME}"))
        check_dict("cluster_rank_info", cluster_rank_info, int, int)
        if len(cluster_rank_info) > MAX_MEMBERS:
            raise refused(_wrong_members(cluster_rank_info))
        for cluster, rank in cluster_rank_info.items():
            uint64("cluster_rank_info key", cluster)
            uint32("cluster_rank_info value", rank)
        typed("rank_table", rank_table, str)
        ranks = list(cluster_rank_info.values())
        if len(ranks) < 2 or any(a >= b for a, b in itertools.pairwise(ranks)):
            raise refused(_wrong_members(cluster_rank_info))
        if self._cluster_id not in cluster_rank_info:
            raise refused(
                ParamInvalid(f"cluster_rank_info is {cluster_rank_info}, it must have the own id {self._cluster_id}")
            )
        self._refuse_hixl("link", engine)
        self.cache_manager.set_is_call_linked()
        comm_id = engine.communicators.link(comm_name, cluster_rank_info, rank_table)
        info("link %s of %s is communicator %d", comm_name, cluster_rank_info, comm_id)
        return comm_id

    def unlink(self, comm_id: int) -> None:
        """Remove the links of a communicator on this side.

        Parameters
        ----------
        comm_id : int
            From `link`.

        Raises
        ------
        TypeError, ValueError
            For an id of another type or width.
        LLMException
            LLM_PARAM_INVALID in KvCacheManager mode; LLM_NOT_YET_LINK for an unknown id; LLM_UNLINK_FAILED when a
            transfer does not end; LLM_FEATURE_NOT_ENABLED with transfer backend hixl.
        RuntimeError
            When not initialised.

        Notes
        -----
        Waits for running transfers, as long as ``sync_kv_timeout``, and ends a preparation that still goes on.
        """
        engine = self._require_cache_manager_mode("unlink")
        uint64("comm_id", comm_id)
        self._refuse_hixl("unlink", engine)
        engine.communicators.unlink(comm_id, time.monotonic_ns() + engine.config.sync_timeout_ms * 1_000_000)
        info("unlinked communicator %d", comm_id)

    def query_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        """Ask how far a communicator is.

        Parameters
        ----------
        comm_id : int
            From `link`.

        Returns
        -------
        RegisterMemStatus
            PREPARING, then OK, or FAILED with the reason in the log.

        Raises
        ------
        TypeError, ValueError
            For an id of another type or width.
        LLMException
            LLM_PARAM_INVALID in KvCacheManager mode; LLM_NOT_YET_LINK for an unknown id; LLM_FEATURE_NOT_ENABLED with
            transfer backend hixl.
        RuntimeError
            When not initialised.
        """
        engine = self._require_cache_manager_mode("query_register_mem_status")
        uint64("comm_id", comm_id)
        self._refuse_hixl("query_register_mem_status", engine)
        state = engine.communicators.state(comm_id)
        return {"ready": RegisterMemStatus.OK, "preparing": RegisterMemStatus.PREPARING}.get(
            state.value, RegisterMemStatus.FAILED
        )

    @staticmethod
    def _refuse_hixl(name: str, engine: Engine) -> None:
        if engine.config.transfer_backend is not None:
            raise refused(
                LLMException(
                    f"{name} does not work with llm.TransferBackend {engine.config.transfer_backend}: "
                    "use link_clusters",
                    status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
                )
            )

    # ------------------------------------------------------------------ roles

    def switch_role(self, role: LLMRole, switch_options: dict[str, str] | None = None) -> None:
        """Change the role.

        Parameters
        ----------
        role : LLMRole
            The new role; in KvCacheManager mode another than the current one.
        switch_options : dict of str to str, optional
            ``llm.listenIpInfo`` says where to listen. KvCacheManager mode needs it for PROMPT; in CacheManager mode the
            engine stops to listen without it.

        Raises
        ------
        TypeError
            For arguments of another type.
        ValueError
            When the port is not a number.
        LLMException
            LLM_PARAM_INVALID (also a ValueError) for the same role, a missing or malformed address; LLM_EXIST_LINK
            while links stand; LLM_FEATURE_NOT_ENABLED without ``enable_switch_role`` or with several devices
            (KvCacheManager mode), or for another address with transfer backend hixl (CacheManager mode); LLM_FAILED
            when the address can't be listened at. Everything stays as it was then.
        RuntimeError
            When not initialised.

        Notes
        -----
        Caches and keys stay.
        """
        engine = self._running()
        typed("role", role, LLMRole)
        cache_manager = engine.config.cache_manager
        if not cache_manager and role is self._role:
            raise refused(ParamInvalid(f"role is {role}, which this cluster has already; allowed are the others"))
        if switch_options is not None:
            check_dict("switch_options", switch_options, str, str)
        listen_info = (switch_options or {}).get(LISTEN_INFO)
        if not cache_manager and role is LLMRole.PROMPT and not listen_info:
            raise refused(ParamInvalid(f"switch_options has no {LISTEN_INFO}, which role PROMPT needs"))
        listen: tuple[Address, ...] = (parse_address(LISTEN_INFO, listen_info),) if listen_info else ()
        if not cache_manager:
            if not engine.config.switch_role or len(engine.config.devices) > 1:
                raise refused(
                    LLMException(
                        'switch_role needs llm.EnableSwitchRole "1" and one device',
                        status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
                    )
                )
            listen = listen if role is LLMRole.PROMPT else ()
        elif engine.config.transfer_backend is not None and list(listen) != engine.links.listening():
            raise refused(
                LLMException(
                    "switch_role can't change the listen address with llm.TransferBackend "
                    f"{engine.config.transfer_backend}",
                    status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
                )
            )
        engine.listen_instead(listen)
        info("switched cluster %d from %s to %s", self._cluster_id, self._role, role)
        self._role = role
        if self._kv_cache_manager is not None:
            self._kv_cache_manager._switch_role(role)


def _shutdown_handler() -> None:
    """Finalize the live instance when the interpreter exits."""
    instance = LLMDataDist.llm_engine_instance
    if instance is not None:
        try:
            instance.finalize()
        except LLMException as e:
            warn("finalize at exit failed: %s", e)


def _wrong_members(ranks: dict[int, int]) -> ParamInvalid:
    return ParamInvalid(
        f"cluster_rank_info is {ranks}, allowed are 2 to {MAX_MEMBERS} clusters with ascending ranks, none twice"
    )


def _check_timeout(timeout: int) -> int:
    int32("timeout", timeout)
    if timeout <= 0:
        raise refused(ParamInvalid(f"timeout is {timeout}, allowed are 1 to {2**31 - 1} ms"))
    return timeout


def _requests(clusters: Sequence[LLMClusterInfo], *, needs_local: bool = False) -> list[LinkRequest]:
    from llm_datadist._engine.links import LinkRequest

    check_isinstance("clusters", clusters, [list, tuple], allow_none=False)
    check_inner("clusters", clusters, LLMClusterInfo)
    for cluster in clusters if needs_local else ():
        if not cluster.local_ip_info_list:
            raise refused(
                ParamInvalid(f"local_ip_info_list is empty for cluster {cluster.remote_cluster_id}, it needs one entry")
            )
    return [
        LinkRequest(
            uint64("remote_cluster_id", cluster.remote_cluster_id),
            _addresses(cluster.local_ip_info_list),
            _addresses(cluster.remote_ip_info_list),
        )
        for cluster in clusters
    ]


def _addresses(ip_info: Sequence[tuple[int | str, int]]) -> tuple[Address, ...]:
    return tuple(Address(canonical_host("ip", ip), port) for ip, port in ip_info)

"""One engine: its parts, their lifecycle, and the only door to them."""

from __future__ import annotations

import contextlib
import resource
import secrets
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llm_datadist._engine import codes, forks
from llm_datadist._engine.board import Board
from llm_datadist._engine.caches import Caches, Pool
from llm_datadist._engine.control import Service
from llm_datadist._engine.directory import Directory
from llm_datadist._engine.links import LinkRequest, Links, Terms
from llm_datadist._engine.space import Space
from llm_datadist._engine.transfers import Transfers
from llm_datadist._log import get_logger
from llm_datadist.backend import Backend as _Backend
from llm_datadist.backend import BackendError, MemoryKind
from llm_datadist.status import LLMException, LLMStatusCode

if TYPE_CHECKING:
    from llm_datadist.configs import EngineConfig

__all__ = ["Engine"]

DIRECTORY_BYTES = 256 << 20  # sparse: a page takes memory when it is first written
BOARD_BYTES = 256 << 20
TENSOR_ALIGNMENT = 512
CLUSTERS_PER_CALL = 16
CLOSE_NS = 5 * 10**9


class Engine:
    """Everything behind one initialised `LLMDataDist`.

    Several engines may live in one process; none has any state outside itself.

    Parameters
    ----------
    config : EngineConfig
        Checked options.
    backend : Backend
        Who holds memory and moves bytes; opened and closed by the engine.
    """

    def __init__(self, config: EngineConfig, backend: _Backend) -> None:
        self.config = config
        self.backend = backend
        self.closed: str | None = None
        self._closing = threading.Lock()
        _raise_descriptor_limit()
        with contextlib.ExitStack() as undo:
            try:
                backend.open(config.devices, {**config.options, "llm.CopyThreads": str(config.copy_threads)})
                undo.callback(backend.close)
                incarnation = secrets.randbits(64)
                directory_window, board_window = backend.make_windows(DIRECTORY_BYTES, BOARD_BYTES)
                self._directory = Directory(directory_window, incarnation)
                board = Board(board_window, self._directory.layout.entry_count)
                pools = self._reserve_pools()
            except BackendError as e:
                raise codes.exception_of(e, config.cache_manager) from e
            self.caches = Caches(backend, self._directory, board, pools, config.cache_manager)
            self._service = Service(f"llm_datadist {config.cluster_id}")
            undo.callback(lambda: self._service.stop(time.monotonic_ns() + CLOSE_NS))
            terms = Terms(
                config.cluster_id,
                incarnation,
                config.cache_manager,
                config.remote_accessible,
                len(config.devices),
            )
            self.links = Links(backend, self._directory, terms, config.namespace, self._service)
            self.links.listen(config.listen)
            self.transfers = Transfers(self.caches, self.links, config.sync_timeout_ms, config.cache_manager)
            undo.pop_all()
        forks.watch(self)

    def _reserve_pools(self) -> list[Pool]:
        pools = []
        limit = self.config.memory_limit
        # A share of 0 is allowed, a region without a byte is not.
        wanted = None if limit is None else max(limit, 1)
        for device in self.config.devices:
            region = self.backend.reserve(device, wanted, MemoryKind.DEVICE)
            pools.append(
                Pool(region, Space(region.nbytes, TENSOR_ALIGNMENT), region.nbytes if limit is None else limit)
            )
        return pools

    # ------------------------------------------------------------------ links

    def link_clusters(
        self, requests: Sequence[LinkRequest], timeout_ms: int
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Link to prompt clusters (KvCacheManager mode)."""
        refusal = self._check_number(requests) or self._check_addresses(requests)
        if refusal is not None:
            return refusal, []
        if not self.links.one_call().acquire(blocking=False):
            return LLMStatusCode.LLM_PROCESSING_LINK, []
        try:
            results = self.links.link(requests, timeout_ms)
        finally:
            self.links.one_call().release()
        fine = (
            LLMStatusCode.LLM_SUCCESS,
            LLMStatusCode.LLM_ALREADY_LINK,
            LLMStatusCode.LLM_REPEAT_REQUEST,
            LLMStatusCode.LLM_PARAM_INVALID,
        )
        failed = any(result not in fine for result in results)
        return (LLMStatusCode.LLM_LINK_FAILED if failed else LLMStatusCode.LLM_SUCCESS), results

    def unlink_clusters(
        self, requests: Sequence[LinkRequest], timeout_ms: int, force: bool, *, as_client: bool
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Unlink clusters (KvCacheManager mode); those without any address are unlinked by their id alone."""
        refusal = self._check_number(requests) or self._check_addresses([r for r in requests if r.local or r.remote])
        if refusal is not None:
            return refusal, []
        if not self.links.one_call().acquire(blocking=False):
            return LLMStatusCode.LLM_PROCESSING_LINK, []
        try:
            results = self.links.unlink(requests, timeout_ms, force, as_client=as_client)
        finally:
            self.links.one_call().release()
        failed = any(r not in (LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_NOT_YET_LINK) for r in results)
        return (LLMStatusCode.LLM_UNLINK_FAILED if failed else LLMStatusCode.LLM_SUCCESS), results

    @staticmethod
    def _check_number(requests: Sequence[LinkRequest]) -> LLMStatusCode | None:
        if not requests:
            get_logger().error("the list of clusters is empty")
            return LLMStatusCode.LLM_PARAM_INVALID
        if len(requests) > CLUSTERS_PER_CALL:
            get_logger().error("%d clusters in one call, allowed are %d", len(requests), CLUSTERS_PER_CALL)
            return LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT
        return None

    def _check_addresses(self, requests: Sequence[LinkRequest]) -> LLMStatusCode | None:
        devices = len(self.config.devices)
        for request in requests:
            local, remote = len(request.local), len(request.remote)
            if local != devices or remote != devices:
                get_logger().error(
                    "cluster %d has %d local and %d remote addresses, expected %d of each, one a device",
                    request.cluster_id,
                    local,
                    remote,
                    devices,
                )
                return LLMStatusCode.LLM_PARAM_INVALID
            if [a.host for a in request.local] != [a.host for a in requests[0].local]:
                get_logger().error("the local addresses differ between the clusters of one call")
                return LLMStatusCode.LLM_PARAM_INVALID
        return None

    def check_link(self, cluster_id: int) -> None:
        """Ask a linked prompt cluster for a sign of life."""
        self.links.check(cluster_id, self.config.sync_timeout_ms)

    # ------------------------------------------------------------------ the end

    def require_open(self) -> None:
        """Raise ENGINE_FINALIZED once the engine is closed, or was inherited by a forked child."""
        if self.closed is not None:
            raise LLMException(self.closed, status_code=LLMStatusCode.LLM_ENGINE_FINALIZED)

    def close(self) -> None:
        """Unlink, withdraw, and give everything back. Idempotent."""
        with self._closing:
            if self.closed is not None:
                return
            self.closed = "the engine was finalized"
        deadline_ns = time.monotonic_ns() + CLOSE_NS
        self._directory.close()
        self.links.close(deadline_ns)
        left = self.caches.close()
        if left is not None:
            get_logger().info("at finalize %s", left)
        if not self._service.stop(deadline_ns):
            get_logger().warning("the service thread did not end in time")
        self.backend.close()

    def abandon(self) -> None:
        """Let go of the descriptors in a forked child. The parent's engine goes on unharmed."""
        if self.closed is None:
            self.closed = "this engine was inherited from the parent process; make and init a new LLMDataDist here"
            self.links.abandon()
            self._service.abandon()
            self.backend.abandon()


def _raise_descriptor_limit() -> None:
    """Allow as many descriptors as the hard limit does: a link takes up to seven, and 512 links are allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

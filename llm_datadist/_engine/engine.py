"""One engine: its parts, their lifecycle, and the only door to them."""

from __future__ import annotations

import contextlib
import resource
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from llm_datadist._engine import codes, forks
from llm_datadist._engine.asked import Answerer
from llm_datadist._engine.board import Board
from llm_datadist._engine.caches import Caches, Pool
from llm_datadist._engine.communicators import Communicators
from llm_datadist._engine.control import Carrier, Service, remaining
from llm_datadist._engine.copies import Copies
from llm_datadist._engine.directory import Directory
from llm_datadist._engine.links import LinkRequest, Links, Terms
from llm_datadist._engine.local import Local
from llm_datadist._engine.network import Network
from llm_datadist._engine.paths import Rules
from llm_datadist._engine.space import Space
from llm_datadist._engine.staging import DENSE_STAGING_BYTES, SPARSE_STAGING_BYTES, Staging
from llm_datadist._engine.transfers import Transfers
from llm_datadist._log import get_logger
from llm_datadist.backend import Backend, BackendError, MemoryKind, Region
from llm_datadist.status import LLMException, LLMStatusCode

if TYPE_CHECKING:
    from llm_datadist._addresses import Address
    from llm_datadist._options import EngineConfig

__all__ = ["Engine"]

#: Of the directory, and of the board: where a page takes memory when it is first written, and where all do.
SPARSE_TABLE_BYTES = 256 << 20
DENSE_TABLE_BYTES = 1 << 20
CLUSTERS_PER_CALL = 16
CLOSE_NS = 5 * 10**9
STOP_NS = 10**9


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

    def __init__(self, config: EngineConfig, backend: Backend) -> None:
        self.config = config
        self.backend = backend
        self.closed: str | None = None
        self._closing = threading.Lock()
        #: Held while memory is read for a `Tensor`, and while it is given back.
        self._loading = threading.Lock()
        self._links_ended = False
        _raise_descriptor_limit()
        with contextlib.ExitStack() as undo:
            try:
                backend.open(config.devices, {**config.options, "llm.CopyThreads": str(config.copy_threads)})
                undo.callback(backend.close)
                incarnation = secrets.randbits(64)
                table_bytes = SPARSE_TABLE_BYTES if backend.capabilities.sparse else DENSE_TABLE_BYTES
                directory_window, board_window = backend.make_windows(table_bytes, table_bytes)
                self._directory = Directory(directory_window, incarnation)
                board = Board(board_window, self._directory.layout.entry_count)
                pools = self._reserve_pools()
                staged = self._reserve_staging()
                self._service = Service(f"llm_datadist {config.cluster_id}")
            except BackendError as e:
                raise codes.exception_of(e, config.cache_manager) from e
            except (OSError, RuntimeError) as e:
                raise LLMException(
                    f"the engine can't start its service thread: {e}", status_code=LLMStatusCode.LLM_FAILED
                ) from e
            self.caches = Caches(backend, self._directory, board, pools, config.cache_manager)
            undo.callback(lambda: self._service.stop(time.monotonic_ns() + CLOSE_NS))
            if backend.capabilities.mapped_words:
                # Peers look at a word of the directory to see that this process lives.
                self._service.run(self._directory.come_alive)
                undo.callback(lambda: self._service.run(self._directory.let_go))
            terms = Terms(
                config.cluster_id,
                incarnation,
                config.cache_manager,
                config.remote_accessible,
                len(config.devices),
            )
            carrier: Carrier = Local(config.namespace)
            if backend.capabilities.network:
                carrier = Network(self._service, config.secret, config.allow_insecure)
            answerer = Answerer(directory_window, board_window, incarnation)
            self.links = Links(backend, self._directory, board, terms, carrier, self._service, answerer)
            self.caches.proved_gone = self.links.proved_gone
            self.staging = Staging(backend, staged, self.caches, self.links)
            self.links.listen(config.listen)
            self.communicators = Communicators(
                self.links,
                self._service,
                carrier,
                config.cluster_id,
                config.link_total_time_s,
                config.link_retry_count,
                config.loopback and not backend.capabilities.network,
            )
            rules = Rules(config.cache_manager, config.remote_accessible, config.device_pool is not None)
            self.transfers = Transfers(self.caches, self.links, self.staging, config.sync_timeout_ms, rules)
            self.copies = Copies(backend, self.caches, config.cache_manager)
            undo.pop_all()
        forks.watch(self)

    def _reserve_pools(self) -> list[Pool]:
        if self.config.cache_manager:
            return self._reserve_paged_pools()
        pools = []
        for device in self.config.devices:
            nbytes = self.config.memory_limit
            if nbytes is not None:
                # Where memory is taken from the start, no more is taken than may be used; yet a pool is never empty.
                nbytes = None if self.backend.capabilities.sparse else max(nbytes, self.backend.capabilities.alignment)
            region = self.backend.reserve(device, nbytes, MemoryKind.DEVICE)
            limit = region.nbytes if self.config.memory_limit is None else self.config.memory_limit
            by = "ge.flowGraphMemMaxSize times llm.MemoryUtilization"
            if self.config.memory_limit is None:
                by = "llm.Simulator.AddressSpace" if self.backend.capabilities.sparse else "a share of what was free"
            pools.append(Pool(region, Space(region.nbytes, self.backend.capabilities.alignment), limit, by))
        return pools

    def _reserve_paged_pools(self) -> list[Pool]:
        pools = []
        for pool, kind in (
            (self.config.device_pool, MemoryKind.DEVICE),
            (self.config.host_pool, MemoryKind.HOST),
        ):
            if pool is not None:
                region = self.backend.reserve(self.config.devices[0], pool.memory_size, kind)
                space = Space(pool.memory_size, 1 << pool.page_shift)
                option = "llm.MemPoolConfig" if kind is MemoryKind.DEVICE else "llm.HostMemPoolConfig"
                pools.append(Pool(region, space, space.nbytes, option))
        return pools

    def _reserve_staging(self) -> Region | None:
        # Only memory that users register may be out of a peer's reach, and only this mode has that.
        if not self.config.cache_manager:
            return None
        nbytes = SPARSE_STAGING_BYTES if self.backend.capabilities.sparse else DENSE_STAGING_BYTES
        return self.backend.reserve(self.config.devices[0], nbytes, MemoryKind.DEVICE)

    # ------------------------------------------------------------------ links

    def link_clusters(
        self, requests: Sequence[LinkRequest], timeout_ms: int
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Link to clusters: prompts in KvCacheManager mode, anyone who listens in CacheManager mode."""
        if self.config.cache_manager:
            results = self._each(requests, lambda fitting: self.links.link(fitting, timeout_ms), self._may_link)
            return _last_failure(results, requests), results
        refusal = self._check_number(requests) or self._check_addresses(requests)
        if refusal is not None:
            return refusal, []
        caller = object()
        try:
            if not self.links.one_call.claim(caller):
                return LLMStatusCode.LLM_PROCESSING_LINK, []
            results = self.links.link(requests, timeout_ms)
        finally:
            self.links.one_call.release(caller)
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
        """Unlink clusters; those without any address are unlinked by their id alone."""
        if self.config.cache_manager:
            results = self._each(
                requests,
                lambda fitting: self.links.unlink(fitting, timeout_ms, force, as_client=True),
                lambda request: force or len(request.remote) <= 1,
            )
            return _last_failure(results, requests), results
        refusal = self._check_number(requests) or self._check_addresses([r for r in requests if r.local or r.remote])
        if refusal is not None:
            return refusal, []
        caller = object()
        try:
            if not self.links.one_call.claim(caller):
                return LLMStatusCode.LLM_PROCESSING_LINK, []
            results = self.links.unlink(requests, timeout_ms, force, as_client=as_client)
        finally:
            self.links.one_call.release(caller)
        failed = any(r not in (LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_NOT_YET_LINK) for r in results)
        return (LLMStatusCode.LLM_UNLINK_FAILED if failed else LLMStatusCode.LLM_SUCCESS), results

    def _may_link(self, request: LinkRequest) -> bool:
        return len(request.remote) == 1 and (bool(self.config.local_comm_res) or len(request.local) == 1)

    @staticmethod
    def _each(
        requests: Sequence[LinkRequest],
        run: Callable[[Sequence[LinkRequest]], list[LLMStatusCode]],
        fits: Callable[[LinkRequest], bool],
    ) -> list[LLMStatusCode]:
        """Run the requests whose addresses fit; the others are PARAM_INVALID."""
        results = iter(run([request for request in requests if fits(request)]))
        return [next(results) if fits(request) else LLMStatusCode.LLM_PARAM_INVALID for request in requests]

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

    def listen_instead(self, addresses: Sequence[Address]) -> None:
        """Change where this engine listens, which needs that no link stands."""
        if self.links.any_live():
            raise LLMException(
                "links stand: unlink all clusters before switch_role", status_code=LLMStatusCode.LLM_EXIST_LINK
            )
        self.links.listen_instead(addresses)

    # ------------------------------------------------------------------ memory

    def load(self, address: int, nbytes: int) -> bytes:
        """Give bytes of a cache, of whichever kind of memory."""
        try:
            with self._loading:
                self.require_open()
                return self.backend.load(address, nbytes)
        except BackendError as e:
            raise codes.exception_of(e, self.config.cache_manager) from e

    def remap(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Tell the driver that (address, bytes) of registered memory have new pages."""
        if not self.links.any_live():
            raise LLMException(
                "remap_registered_memory needs a link, and none stands", status_code=LLMStatusCode.LLM_NOT_YET_LINK
            )
        try:
            self.backend.remap(ranges)
        except BackendError as e:
            raise codes.exception_of(e, self.config.cache_manager) from e

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
        with contextlib.ExitStack() as steps:  # the last one pushed comes first, and none is left out
            steps.callback(self._close_memory, deadline_ns)
            steps.callback(self._close_caches, deadline_ns)
            steps.callback(self.staging.close, deadline_ns)
            steps.callback(self.communicators.wait, deadline_ns)
            steps.callback(self._close_links, deadline_ns)
            steps.callback(self.communicators.cancel)
            steps.callback(self._directory.close)

    def _close_caches(self, deadline_ns: int) -> None:
        left = self.caches.close(deadline_ns)
        if left is not None:
            get_logger().info("at finalize %s", left)

    def _close_links(self, deadline_ns: int) -> None:
        self._links_ended = self.links.close(deadline_ns)

    def _close_memory(self, deadline_ns: int) -> None:
        if self.backend.capabilities.mapped_words:
            self._service.run(self._directory.let_go)
        # It ends soon, even where the time has gone to something else.
        stopped = self._service.stop(max(deadline_ns, time.monotonic_ns() + STOP_NS))
        idle = self._links_ended and self.caches.wait_unused(deadline_ns) and stopped
        if idle and self._loading.acquire(timeout=remaining(deadline_ns)):
            try:
                self.backend.close()
            finally:
                self._loading.release()
        else:
            # Unmapping memory under a thread that uses it would end the process; the exit gives it back.
            get_logger().error("finalize leaves its memory mapped: a transfer, a copy or a new link does not end")

    def abandon(self) -> None:
        """Let go of the descriptors in a forked child. The parent's engine goes on unharmed."""
        if self.closed is None:
            self.closed = "this engine was inherited from the parent process; make and init a new LLMDataDist here"
            self.communicators.abandon()
            self.links.abandon()
            self._service.abandon()
            self.backend.abandon()


def _last_failure(results: Sequence[LLMStatusCode], requests: Sequence[LinkRequest]) -> LLMStatusCode:
    """Give the overall result of CacheManager mode."""
    if not requests:
        get_logger().error("the list of clusters is empty")
        return LLMStatusCode.LLM_PARAM_INVALID
    return next((r for r in reversed(results) if r is not LLMStatusCode.LLM_SUCCESS), LLMStatusCode.LLM_SUCCESS)


def _raise_descriptor_limit() -> None:
    """Allow as many descriptors as the hard limit does: a link takes up to seven, and 512 links are allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

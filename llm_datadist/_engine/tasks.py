"""Asynchronous transfers: one daemon thread a task walks the layers, and every target gets a result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from llm_datadist._log import get_logger
from llm_datadist.status import LLMException, LLMStatusCode

__all__ = ["LayerTask", "Target"]


class Target(Protocol):
    """One destination of a task."""

    @property
    def layers(self) -> range:
        """The source layers that it wants."""

    def transfer(self, layer: int) -> None:
        """Move one layer; raises LLMException."""


class LayerTask:
    """One asynchronous transfer of layers to several targets.

    A plain daemon thread, and not a pool's: the interpreter joins those before exit hooks run, and would hang on a
    synchronizer that waits for ever.

    Parameters
    ----------
    synchronize : callable
        Says of a layer when it may be moved; returns falsy, or raises, if it never may.
    targets : sequence of Target
        In the order of the results.
    layers : int
        Layers of the source.
    stopped : callable
        Gives a reason once the engine is closed.
    timeout_status : LLMStatusCode
        What a wait that runs out reports.
    """

    def __init__(
        self,
        synchronize: Callable[[int], bool],
        targets: Sequence[Target],
        layers: int,
        stopped: Callable[[], str | None],
        timeout_status: LLMStatusCode,
    ) -> None:
        self.timeout_status = timeout_status
        #: Why the task failed, for people: text of the exception, and layer.
        self.failure: str | None = None
        self._synchronize = synchronize
        self._targets = targets
        self._layers = layers
        self._stopped = stopped
        self._results: list[LLMStatusCode | None] = [None] * len(targets)
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="llm_datadist transfer", daemon=True).start()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the end; say whether it came."""
        return self._ended.wait(timeout_s)

    def results(self) -> list[LLMStatusCode | None]:
        """Give one result for each target; None for one whose last layer was not reached."""
        return list(self._results)

    def _run(self) -> None:
        try:
            for layer in range(self._layers):
                wanting = [i for i, target in enumerate(self._targets) if layer in target.layers]
                if wanting and not self._layer(layer, wanting):
                    return
        finally:
            self._ended.set()

    def _layer(self, layer: int, wanting: list[int]) -> bool:
        try:
            ready = self._synchronize(layer)
        except BaseException as e:
            # The user's code: whatever it raises must not pass for success, nor end the process.
            get_logger().error("synchronize_layer(%d) raised %r", layer, e, exc_info=True)
            return self._fail(wanting, LLMStatusCode.LLM_FAILED, f"synchronize_layer({layer}) raised {e!r}")
        if not ready:
            return self._fail(
                wanting, LLMStatusCode.LLM_PARAM_INVALID, f"synchronize_layer({layer}) returned {ready!r}"
            )
        for i in wanting:
            reason = self._stopped()
            if reason is not None:
                return self._fail([i], LLMStatusCode.LLM_ENGINE_FINALIZED, f"layer {layer}: {reason}")
            try:
                self._targets[i].transfer(layer)
            except LLMException as e:
                return self._fail([i], e.status_code, f"layer {layer} to target {i}: {e}")
            except Exception as e:
                get_logger().error("layer %d to target %d raised %r", layer, i, e, exc_info=True)
                return self._fail([i], LLMStatusCode.LLM_FAILED, f"layer {layer} to target {i} raised {e!r}")
            if layer == self._targets[i].layers[-1]:
                self._results[i] = LLMStatusCode.LLM_SUCCESS
        return True

    def _fail(self, targets: list[int], status: LLMStatusCode, why: str) -> bool:
        get_logger().error("an asynchronous transfer stopped: %s", why)
        self.failure = why
        for i in targets:
            self._results[i] = status
        return False

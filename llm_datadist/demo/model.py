"""A small decoder-only transformer in numpy: grouped-query attention, rotary positions, byte tokens.

Its weights are random with a fixed seed, so what it writes is nonsense, but the same nonsense everywhere. Keys and
values live in a `KvStore`, which is all that a transfer has to hand over.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["HEAD_SIZE", "KV_HEADS", "TENSORS", "KvStore", "Model"]

Array = npt.NDArray[np.float32]

VOCABULARY = 256  # one token is one byte
LAYERS = 4
HEADS = 8
KV_HEADS = 2
HEAD_SIZE = 32
WIDTH = HEADS * HEAD_SIZE
HIDDEN = 2 * WIDTH
TENSORS = 2 * LAYERS  # K of layer 0, V of layer 0, K of layer 1, ...


class KvStore(Protocol):
    """Where keys and values of one request live, as float16 rows of shape ``(KV_HEADS, HEAD_SIZE)``, one a token."""

    def write(self, tensor: int, position: int, rows: npt.NDArray[Any]) -> None:
        """Store rows from a token position on."""

    def read(self, tensor: int, length: int) -> npt.NDArray[np.float16]:
        """Give the first rows."""


class Model:
    """The weights, and the forward pass over a `KvStore`."""

    def __init__(self, seed: int = 0) -> None:
        random = np.random.default_rng(seed)

        def weights(rows: int, columns: int) -> Array:
            drawn: Array = random.standard_normal((rows, columns), dtype=np.float32)
            drawn /= np.float32(math.sqrt(rows))
            return drawn

        kv_width = KV_HEADS * HEAD_SIZE
        self._embedding = random.standard_normal((VOCABULARY, WIDTH), dtype=np.float32)
        self._layers = [
            {
                # Large, so that attention is sharp: what is written depends on single tokens, not on their mean.
                "query": 4 * weights(WIDTH, WIDTH),
                "key": weights(WIDTH, kv_width),
                "value": weights(WIDTH, kv_width),
                "output": weights(WIDTH, WIDTH),
                "gate": weights(WIDTH, HIDDEN),
                "up": weights(WIDTH, HIDDEN),
                "down": weights(HIDDEN, WIDTH),
            }
            for _ in range(LAYERS)
        ]
        self._logits = weights(WIDTH, VOCABULARY)

    def forward(self, tokens: list[int], position: int, store: KvStore) -> int:
        """Read tokens, store their keys and values, and give the likeliest next token.

        Parameters
        ----------
        tokens : list of int
            The new tokens, 0 to 255 each.
        position : int
            How many tokens the store holds already.
        store : KvStore
            Keys and values of the earlier tokens; those of the new ones are added.

        Returns
        -------
        int
            The next token.
        """
        end = position + len(tokens)
        positions = np.arange(position, end)
        hidden = np.arange(end) > positions[:, None]  # no token looks ahead
        state = self._embedding[tokens]
        for index, layer in enumerate(self._layers):
            normed = _normalise(state)
            query = _rotate((normed @ layer["query"]).reshape(-1, HEADS, HEAD_SIZE), positions)
            key = _rotate((normed @ layer["key"]).reshape(-1, KV_HEADS, HEAD_SIZE), positions)
            store.write(2 * index, position, key)
            store.write(2 * index + 1, position, (normed @ layer["value"]).reshape(-1, KV_HEADS, HEAD_SIZE))
            # Read back what was stored, rounded to float16, so that every process computes with the same numbers.
            keys = store.read(2 * index, end).astype(np.float32)
            values = store.read(2 * index + 1, end).astype(np.float32)
            state = state + _attend(query, keys, values, hidden) @ layer["output"]
            normed = _normalise(state)
            gate = normed @ layer["gate"]
            state = state + (gate / (1 + np.exp(-gate)) * (normed @ layer["up"])) @ layer["down"]
        return int(np.argmax(_normalise(state[-1]) @ self._logits))

    def generate(self, token: int, position: int, count: int, store: KvStore) -> list[int]:
        """Go on greedily from one token; give it and the ``count - 1`` that follow."""
        tokens = [token]
        while len(tokens) < count:
            tokens.append(self.forward(tokens[-1:], position, store))
            position += 1
        return tokens


def _normalise(state: Array) -> Array:
    scaled: Array = state / np.sqrt(np.mean(state * state, axis=-1, keepdims=True) + np.float32(1e-6))
    return scaled


def _rotate(heads: Array, positions: npt.NDArray[np.int64]) -> Array:
    """Turn each pair of numbers of a head by an angle that grows with the token's position."""
    half = HEAD_SIZE // 2
    speed = 10000.0 ** (-np.arange(half) / half)
    angle = (positions[:, None, None] * speed).astype(np.float32)
    first, second = heads[..., :half], heads[..., half:]
    cosine, sine = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cosine - second * sine, first * sine + second * cosine], axis=-1)


def _attend(query: Array, keys: Array, values: Array, hidden: npt.NDArray[np.bool_]) -> Array:
    """Let each group of query heads look at its one key-value head."""
    tokens = len(query)
    grouped = query.reshape(tokens, KV_HEADS, HEADS // KV_HEADS, HEAD_SIZE).transpose(1, 2, 0, 3)
    scores = grouped @ keys.transpose(1, 2, 0)[:, None] / np.float32(math.sqrt(HEAD_SIZE))
    scores = np.where(hidden, np.float32(-np.inf), scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    seen = weights @ values.transpose(1, 0, 2)[:, None]
    joined: Array = seen.transpose(2, 0, 1, 3).reshape(tokens, WIDTH)
    return joined

"""DecodeStep: the next logits for one more token a sequence, as the same work each time.

On a GPU the step is recorded as a CUDA graph, so that a small model does not wait for Python to launch some hundred
kernels; with `compile` it is also compiled as a whole.
"""

from __future__ import annotations

import functools
import gc
import types
from typing import TYPE_CHECKING, Any

import torch

from fuselm.model.kv_cache import KVCache

if TYPE_CHECKING:
    from fuselm.model.llama import Llama


def _forward(model: Llama, tokens: torch.Tensor, cache: KVCache) -> torch.Tensor:
    return model(tokens, cache=cache)[:, 0]


@functools.lru_cache(maxsize=64)
def _compiled(batch: int, max_len: int, dtype: torch.dtype, device: torch.device) -> Any:
    """`_forward`, compiled once for all caches of this shape.

    Each shape has a code object of its own: torch.compile counts the versions of a code object, and after a few of them
    refuses to make another.
    """
    code = _forward.__code__.replace(co_name=f"decode_{batch}_{max_len}_{str(dtype)[6:]}_{device.type}")
    return torch.compile(types.FunctionType(code, globals()), fullgraph=True, dynamic=False)


class DecodeStep:
    """Decodes with a cache that holds the prompts.

    Args:
        model: on the cache's device. Its weights may change in place between steps, but not move.
        cache: no other forward pass may use it from now on until `close`.
        compile: compile the step, whole; takes seconds for the first cache of its shape.
        graph: record it as a CUDA graph at the second step; None does so on a GPU.

    Raises:
        ValueError: a CUDA graph was asked for elsewhere.
    """

    def __init__(self, model: Llama, cache: KVCache, *, compile: bool = False, graph: bool | None = None) -> None:
        device = cache.lengths.device
        if graph and device.type != "cuda":
            raise ValueError(f"graph=True: the cache is on {device}, CUDA graphs need an NVIDIA GPU")
        self._use_graph = device.type == "cuda" if graph is None else graph
        self.cache = cache
        cache.decoding = True
        self._tokens = torch.zeros(cache.lengths.shape[0], 1, dtype=torch.int64, device=device)
        keys = cache.keys[0]
        step = _compiled(keys.shape[0], keys.shape[1], keys.dtype, device) if compile else _forward
        self._run: Any = functools.partial(step, model, self._tokens, cache)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: Any = None
        self._steps = 0

    @torch.no_grad()
    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Appends a token a sequence.

        Args:
            tokens: (batch,) integers.

        Returns:
            (batch, vocab_size) logits for the next one; the next step overwrites them.

        Raises:
            ValueError: the cache is full.
        """
        cache = self.cache
        if cache.length + 1 > cache.max_len:
            raise ValueError(f"the cache holds {cache.max_len} tokens and is full; make it with a larger max_len")
        self._tokens.copy_(tokens[:, None])
        with torch.cuda.device_of(self._tokens):  # streams and graphs belong to the current device
            logits = self._step()
        self._steps += 1
        cache.length += 1
        return logits

    def _step(self) -> torch.Tensor:
        if not self._use_graph:
            return self._run()
        if self._graph is not None:
            self._graph.replay()
        elif self._steps == 0:
            return self._warm_up()
        else:
            self._record()
        return self._logits

    def _warm_up(self) -> torch.Tensor:
        """The first step compiles kernels and allocates workspaces, on a side stream as recording will."""
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            logits = self._run()
        main.wait_stream(side)
        logits.record_stream(main)
        return logits

    def _record(self) -> None:
        """Records the step and runs it once.

        Not by `torch.cuda.graph`, which empties the allocator's cache first: that takes longer than many steps. What it
        guards against, garbage that is collected while recording and frees device objects, is kept out here.
        """
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        gc.disable()
        try:
            with torch.cuda.stream(side):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._logits = self._run()  # recorded, not run
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        main.wait_stream(side)
        self._graph = graph
        graph.replay()

    def close(self) -> None:
        """Frees the graph; the cache can take prompts again."""
        self._graph = self._logits = None
        self.cache.decoding = False

"""A run that stands still ends with a message that names the rank that holds the others up, and where it is.

Each rank says where it is, in the same order as the others (`HangWatch.at`); a thread posts that to the processes'
common store every few seconds. When a rank has not moved for too long, its thread reads what the others posted: those
that came less far hold the rest up, and those that post nothing any more are stopped or lost. This works alike for
NCCL, gloo, a file system that does not answer, and a loop that never ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from fuselm.train.distributed import World
from fuselm.train.packing import BATCHES_THREAD

_KEY = f"fuselm/where/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
_TOLD = f"{_KEY}/told"
_PATIENCE = 5.0  # seconds for the last message
_EXIT_CODE = 1  # torchrun --max-restarts starts all ranks again


class HangWatch:
    """Watches this rank's main thread. Every rank makes one.

    Args:
        world: all ranks.
        timeout: seconds without a move after which the process ends; 0 for never. Those in which the whole process was
            stopped do not count.
        on_stall: is told after half of that time, once a standstill, from a thread of its own.
        leave: ends the process, after the message was printed.
    """

    def __init__(
        self,
        world: World,
        timeout: float,
        on_stall: Callable[[str], None],
        leave: Callable[[int], Any] = os._exit,
    ) -> None:
        self.world, self.timeout, self.on_stall, self.leave = world, timeout, on_stall, leave
        self._moves, self._where, self._step, self._patient = 0, "start", 0, False
        self._main = threading.main_thread().ident or 0
        self._interval = min(5.0, timeout / 8)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang watch", daemon=True)

    def __enter__(self) -> HangWatch:
        if self.timeout:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.set()
        if self.timeout:
            self._thread.join()

    def at(self, where: str, step: int) -> None:
        """The main thread begins something; all ranks in the same order.

        Args:
            where: what, for the message.
            step: optimizer steps done.
        """
        self._where, self._step = where, step
        self._moves += 1

    @contextmanager
    def patiently(self) -> Iterator[None]:
        """Meanwhile the main thread may stand still for any time, as with a slow disk."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False

    # --- The watching thread ---

    def _watch(self) -> None:
        store = self._open_store()
        self._post(store, "")
        moves, since, told = -1, time.monotonic(), False
        asked = since
        while not self._end.wait(self._interval):
            now = time.monotonic()
            since += max(now - asked - 2 * self._interval, 0.0)  # stopped as a whole (Ctrl-Z): nothing could move
            if self._moves != moves or self._patient:
                moves, since, told = self._moves, now, False
            stuck = now - since
            self._post(store, self._stack() if stuck > self.timeout / 4 else "")
            if stuck >= self.timeout / 2 and not told:
                told = True
                where = f"{self._where} of step {self._step + 1}"
                _aside(self.on_stall, f"nothing has moved for {stuck:.0f} s in {where}")
            if stuck >= self.timeout and self._report(store, stuck, moves):
                self.leave(_EXIT_CODE)
                return
            asked = time.monotonic()

    def _open_store(self) -> Store | None:
        """A connection of its own: the one of the process group may be what the main thread waits on."""
        if self.world.size == 1:
            return None
        address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
        try:
            return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False)
        except (RuntimeError, dist.DistError):
            return None  # without the others' places the message has only this rank's

    def _post(self, store: Store | None, stack: str) -> None:
        self._beats = getattr(self, "_beats", 0) + 1
        if store is None:
            return
        place = {"moves": self._moves, "where": self._where, "step": self._step, "stack": stack, "beats": self._beats}
        try:
            store.set(f"{_KEY}/{self.world.rank}", json.dumps(place))
        except (RuntimeError, dist.DistError):
            return

    def _read(self, store: Store) -> dict[int, dict[str, Any]]:
        keys = [f"{_KEY}/{rank}" for rank in range(self.world.size)]
        return {rank: json.loads(store.get(key)) for rank, key in enumerate(keys) if store.check([key])}

    def _moves_again(self, moves: int) -> bool:
        return self._moves != moves or self._patient or self._end.is_set()

    def _report(self, store: Store | None, stuck: float, moves: int) -> bool:
        """Says who holds the others up, or leaves that to another rank; False where this one moves again meanwhile."""
        mine = f"rank {self.world.rank} waits in {self._where} of step {self._step + 1} ({self._stack()})"
        places: dict[int, dict[str, Any]] = {}
        silent: list[int] = []
        if store is not None:
            try:
                before = self._read(store)
                self._end.wait(2.5 * self._interval)  # the others post meanwhile, if they can
                if self._moves_again(moves):
                    return False
                self._post(store, self._stack())
                places = self._read(store)
                silent = [r for r in range(self.world.size) if r not in before or before[r] == places.get(r)]
            except (RuntimeError, dist.DistError):
                places = {}
        if not places:
            self._print(f"nothing has moved for {stuck:.0f} s: {mine}; the other ranks cannot be asked")
            return True
        behind = silent
        if not silent:
            least = min(place["moves"] for place in places.values())
            behind = [r for r, place in places.items() if place["moves"] == least]
            behind = behind if len(behind) < self.world.size else []
        reporter = min((r for r in places if r not in behind), default=0)
        if self.world.rank != reporter and self._another_tells(store, moves):
            return not self._moves_again(moves)
        if not behind:
            self._print(f"nothing has moved for {stuck:.0f} s: all ranks are at the same place: {mine}")
        else:
            told = [_describe(rank, places.get(rank), rank in silent) for rank in behind]
            self._print(f"nothing has moved for {stuck:.0f} s: {'; '.join(told)}; {mine}")
        if store is not None:
            with suppress(RuntimeError, dist.DistError):
                store.set(_TOLD, "")
        return True

    def _another_tells(self, store: Store | None, moves: int) -> bool:
        """Goes on posting until another rank has told, so that this one does not pass for lost: a rank that holds the
        others up stands still before they do. False if nobody tells in the time that the others had, too. True if this
        one moves again."""
        end = time.monotonic() + self.timeout
        try:
            while store is not None and time.monotonic() < end:
                if store.check([_TOLD]):
                    return True
                self._post(store, self._stack())
                self._end.wait(self._interval)
                if self._moves_again(moves):
                    return True
        except (RuntimeError, dist.DistError):  # the rank that keeps the store has left
            return True
        return False

    def _print(self, text: str) -> None:
        def write() -> None:
            print(f"error: {text}", file=sys.stderr, flush=True)
            sys.stdout.flush()

        _aside(write).join(_PATIENCE)

    def _stack(self) -> str:
        """Where the main thread is: our own innermost function, and what it called."""
        running: dict[int, FrameType] = sys._current_frames()
        frames = list(traceback.extract_stack(running.get(self._main)))
        if any(Path(f.filename).name == "packing.py" for f in frames):  # it waits for the thread that makes batches
            for thread in threading.enumerate():
                if thread.name.startswith(BATCHES_THREAD) and thread.ident in running:
                    frames += traceback.extract_stack(running[thread.ident])
        ours = [f for f in frames if "fuselm" in Path(f.filename).parts or "train" in Path(f.filename).parts]
        shown = [*ours[-2:], *frames[-1:]]
        place = " > ".join(dict.fromkeys(f"{f.name} at {Path(f.filename).name}:{f.lineno}" for f in shown))
        return ", ".join([place, *waiting_collectives()])


def _aside(function: Callable[..., Any], *arguments: Any) -> threading.Thread:
    """Starts it in a thread that nobody has to wait for: what holds the main thread up (a file system that does not
    answer, a terminal that takes no text) must not hold up who watches it."""
    thread = threading.Thread(target=function, args=arguments, name="hang watch's messages", daemon=True)
    thread.start()
    return thread


def waiting_collectives() -> list[str]:
    """The NCCL collectives that this process has under way, by PyTorch's flight recorder, the oldest first; at most
    three."""
    dump = getattr(c10d, "_dump_nccl_trace_json", None)  # only where PyTorch has NCCL
    if dump is None:
        return []
    try:
        entries = json.loads(dump(includeCollectives=True, onlyActive=True)).get("entries", [])
        return [f"{e['profiling_name']} number {e['collective_seq_id']}" for e in entries[:3]]
    except (
        RuntimeError,
        TypeError,
        ValueError,
        KeyError,
    ):  # its format is PyTorch's own, and the message is worth more
        return []


def _describe(rank: int, place: dict[str, Any] | None, silent: bool) -> str:
    if place is None:
        return f"rank {rank} has never answered"
    where = f"{place['where']} of step {place['step'] + 1}"
    if silent:
        return f"rank {rank} does not answer any more, it is stopped or lost; it was last in {where}"
    stack = f" ({place['stack']})" if place["stack"] else ""
    return f"rank {rank} holds the others up, in {where}{stack}"

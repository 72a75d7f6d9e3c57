"""Lanes: what a call does with each peer, side by side, so that a late peer delays nothing but its own."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence

from zipccl_core.collective.work import in_mode_of_caller

Job = Callable[[], None]


def run_lanes(jobs: Sequence[Job]) -> None:
    """Runs jobs at the same time, the first of them in this thread, and returns when all have ended.

    Raises:
        BaseException: what the first of them raised, in their order.
    """
    lanes = [_Lane(in_mode_of_caller(job)) for job in jobs]
    started: list[_Lane] = []
    try:
        for lane in lanes[1:]:
            _THREADS.start(lane)
            started.append(lane)
        for lane in lanes[:1]:
            lane.run()
    finally:  # also where a thread cannot be started: a lane that goes on would write into the caller's memory
        for lane in started:
            lane.ended.wait()
    for lane in lanes:
        if lane.error is not None:
            raise lane.error


class _Lane:
    def __init__(self, job: Job) -> None:
        self._job: Job | None = job
        self.error: BaseException | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        assert self._job is not None
        try:
            self._job()
        except BaseException as caught:  # raised by who runs the lanes
            self.error = caught
        self._job = None  # and with it the tensors
        self.ended.set()


class _Threads:
    """As many threads as there are lanes at a time, reused. A limit could let two groups wait for each other."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """In a forked child, which has none of them."""
        self._idle: queue.SimpleQueue[queue.SimpleQueue[_Lane]] = queue.SimpleQueue()

    def start(self, lane: _Lane) -> None:
        """Runs a lane on an idle thread, or on a new one."""
        try:
            inbox = self._idle.get_nowait()
        except queue.Empty:
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(inbox,), name="zipccl-lane", daemon=True).start()
        inbox.put(lane)

    def _serve(self, inbox: queue.SimpleQueue[_Lane]) -> None:
        while True:
            lane = inbox.get()
            lane.run()
            del lane
            self._idle.put(inbox)


_THREADS = _Threads()
os.register_at_fork(after_in_child=_THREADS.forget)

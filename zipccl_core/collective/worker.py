"""Worker: the thread that carries the calls of a group out, in their order (docs/adr/001)."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable
from weakref import WeakSet

import torch

from zipccl_core.collective.work import ZipCCLWork, in_mode_of_caller

EXIT_PATIENCE_S = 5.0


class Worker:
    """Carries calls out one after another, in the order of submission, which is the same on all ranks.

    An asynchronous call is a queue entry for its thread; a synchronous one waits for the queue to drain and runs in
    the caller's thread. So calls make progress whether or not anybody waits for them, and waits may come in any
    order.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], ZipCCLWork] | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._pending = 0
        self._thread: threading.Thread | None = None

    def submit(
        self, call: Callable[[], None], result: list[torch.Tensor], work: ZipCCLWork | None = None
    ) -> ZipCCLWork:
        """Queues a call, and completes its work, a new one or the caller's, when it has ended."""
        work = ZipCCLWork(result) if work is None else work
        with self._idle:
            self._pending += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()
                _RUNNING.add(self)
        self._queue.put((in_mode_of_caller(call), work))
        return work

    def run(self, call: Callable[[], None]) -> None:
        """Runs a call here, after all that were submitted."""
        if self._pending:
            self.drain()
        with torch.no_grad():
            call()

    def drain(self) -> None:
        """Waits until all submitted calls have ended, well or not."""
        with self._idle:
            self._idle.wait_for(lambda: self._pending == 0)

    def stop(self, patience_s: float | None = None) -> None:
        """Ends the thread after the calls that were submitted; gives up waiting for it where patience is limited."""
        with self._idle:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(patience_s)

    def _loop(self) -> None:
        while (entry := self._queue.get()) is not None:
            call, work = entry
            error: BaseException | None = None
            try:
                call()
            except BaseException as caught:  # handed to whoever waits
                error = caught
            with self._idle:
                self._pending -= 1
                self._idle.notify_all()
            work.complete(error)
            del entry, call, work, error  # with its traceback, and the memory that its frames hold


_RUNNING: WeakSet[Worker] = WeakSet()


@atexit.register
def _stop_all() -> None:
    """A thread that is inside of torch when the interpreter goes aborts the process."""
    for worker in list(_RUNNING):
        worker.stop(EXIT_PATIENCE_S)

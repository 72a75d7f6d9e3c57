"""Work: what an asynchronous call returns, a real `torch.distributed.Work`; and the thread that carries calls out in
order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

NO_TIMEOUT = timedelta(0)


class ZipCCLWork(dist.Work):
    """A call that runs on a communicator's worker.

    `wait` raises what the call raised. `get_future` does too: C++ code (DDP's reducer) would read an exception set on
    a future as a result and crash, so the error is raised inside of a `then`.
    """

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._result = result
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._error: BaseException | None = None

    def _complete(self, error: BaseException | None) -> None:
        self._error = error
        self._future.set_result(self._result if error is None else error)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Blocks until the output is there."""
        self._future.wait()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._future.done()

    def is_success(self) -> bool:
        """Whether the call has ended well."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """What the call raised."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the output tensors."""

        def raise_or_pass(future: torch.futures.Future[Any]) -> Any:
            value = future.value()
            if isinstance(value, BaseException):
                raise value
            return value

        return self._future.then(raise_or_pass)


class LazyWork(ZipCCLWork):
    """A call whose messages are on their way already, and that ends in the thread that waits for it: send and receive.

    Args:
        result: the tensors.
        finish: receives and decodes; called once.
        source: the rank that a receive came from, once finished.
    """

    def __init__(
        self, result: list[torch.Tensor], finish: Callable[[], None], source: Callable[[], int | None]
    ) -> None:
        super().__init__(result)
        self._finish, self._source = finish, source
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Ends the call, or waits for the thread that does."""
        self._end()
        return super().wait(timeout)

    def has_ended(self) -> bool:
        """Whether the call has ended; starts nothing."""
        return self._future.done()

    def is_completed(self) -> bool:
        """Whether the call has ended. Who polls does not wait, so from the first poll on a thread of its own ends the
        call."""
        self._end_in_background()
        return self._future.done()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the output tensors; a thread of its own ends the call."""
        self._end_in_background()
        return super().get_future()

    def _end(self) -> None:
        with self._lock:
            if self._future.done():
                return
            error: BaseException | None = None
            try:
                self._finish()
            except BaseException as caught:  # raised by every wait
                error = caught
            self._complete(error)

    def _end_in_background(self) -> None:
        if self._thread is None and not self._future.done():
            self._thread = threading.Thread(target=self._end, name="zipccl-message", daemon=True)
            self._thread.start()

    def _source_rank(self) -> int:
        source = self._source()
        return -1 if source is None else source


class JoinedWork(dist.Work):
    """Several works as one."""

    def __init__(self, works: Sequence[dist.Work], result: list[torch.Tensor]) -> None:
        super().__init__()
        self._works, self._result = list(works), result

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Waits for all."""
        for work in self._works:
            work.wait()
        return True

    def synchronize(self) -> None:
        """Same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether all are."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all are."""
        return all(work.is_success() for work in self._works)

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the output tensors."""
        result = self._result
        return torch.futures.collect_all([work.get_future() for work in self._works]).then(
            lambda future: future.wait() and result
        )


def completed_work(result: list[torch.Tensor]) -> dist.Work:
    """A work that is done."""
    work = ZipCCLWork(result)
    work._complete(None)
    return work


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

    def submit(self, call: Callable[[], None], result: list[torch.Tensor]) -> ZipCCLWork:
        """Queues a call."""
        work = ZipCCLWork(result)
        with self._idle:
            self._pending += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()
        self._queue.put((call, work))
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

    def stop(self) -> None:
        """Ends the thread after the calls that were submitted."""
        with self._idle:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def _loop(self) -> None:
        while (entry := self._queue.get()) is not None:
            call, work = entry
            error: BaseException | None = None
            try:
                with torch.no_grad():
                    call()
            except BaseException as caught:  # handed to whoever waits
                error = caught
            with self._idle:
                self._pending -= 1
                self._idle.notify_all()
            work._complete(error)
            del entry, call, work

"""Work: what an asynchronous call returns, a real `torch.distributed.Work`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from zipccl_core.errors import TransportError

NO_TIMEOUT = timedelta(0)


class ZipCCLWork(dist.Work):
    """A call that is under way, or done.

    `wait` raises what the call raised, and a TransportError where the call has not ended within its timeout.
    """

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._result = result
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None
        self._future_devices: list[int | str | torch.device] = []

    def complete(self, error: BaseException | None = None) -> None:
        """Says that the call has ended, well or not; once, by who carried it out."""
        with self._lock:
            self._error = error
            self._ended.set()
            future = self._future
        if future is not None:
            # A callback may wait for another call of this group: it must not hold up the thread that carries calls out.
            threading.Thread(target=self._resolve, args=(future,), name="zipccl-callbacks", daemon=True).start()

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Blocks until the output is there; without end where the timeout is zero."""
        if not self._ended.wait(timeout.total_seconds() or None):
            raise TransportError(f"the call has not ended within {timeout.total_seconds()} s")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._ended.is_set()

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
        """A future of the output tensors, which raises what the call raised.

        C++ code (DDP's reducer) would read an exception that is set on a future as a result, and crash; so the error
        is raised inside of a `then`.
        """
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future(devices=self._future_devices)
                if self._ended.is_set():
                    self._resolve(self._future)
            future = self._future

        def raise_or_pass(ended: torch.futures.Future[Any]) -> Any:
            value = ended.value()
            if isinstance(value, BaseException):
                raise value
            return value

        return future.then(raise_or_pass)

    def _resolve(self, future: torch.futures.Future[Any]) -> None:
        future.set_result(self._result if self._error is None else self._error)


class LazyWork(ZipCCLWork):
    """A call whose messages are on their way already, and that ends in the thread that waits for it: send and receive.

    Args:
        result: the tensors.
        finish: receives and decodes; called once. Returns the rank that a receive came from.
        ended: called with this when the call has ended.
    """

    def __init__(
        self, result: list[torch.Tensor], finish: Callable[[], int | None], ended: Callable[[LazyWork], object]
    ) -> None:
        super().__init__(result)
        self._source: int | None = None

        def finish_and_keep_source() -> None:
            self._source = finish()

        self._finish: Callable[[], None] | None = in_mode_of_caller(finish_and_keep_source)
        self._tell_ended = ended
        self._finishing = threading.Lock()
        self._thread: threading.Thread | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Ends the call, or waits for the thread that does."""
        if timeout:
            self.end_in_background()
        else:
            self.end()
        return super().wait(timeout)

    def is_completed(self) -> bool:
        """Whether the call has ended. Who polls does not wait: from the first poll on a thread of its own ends it."""
        self.end_in_background()
        return self._ended.is_set()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the output tensors; a thread of its own ends the call."""
        self.end_in_background()
        return super().get_future()

    def end_in_background(self) -> None:
        """Lets a thread of its own end the call."""
        if self._thread is None and not self._ended.is_set():
            self._thread = threading.Thread(target=self.end, name="zipccl-message", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Ends the call here, unless it has ended. Errors are for those who wait."""
        with self._finishing:
            if self._finish is None:
                return
            error: BaseException | None = None
            try:
                self._finish()
            except BaseException as caught:  # raised by every wait
                error = caught
            self._finish = None  # and with it the message's memory
            self._tell_ended(self)
            self.complete(error)

    def _source_rank(self) -> int:
        return -1 if self._source is None else self._source


class JoinedWork(dist.Work):
    """Several works as one."""

    def __init__(self, works: Sequence[dist.Work], result: list[torch.Tensor]) -> None:
        super().__init__()
        self._works, self._result = list(works), result

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Waits for all."""
        deadline = monotonic() + timeout.total_seconds()
        for work in self._works:
            left = max(deadline - monotonic(), 1e-3)
            work.wait(timedelta(seconds=left)) if timeout else work.wait()
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
        futures = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures).then(lambda future: future.wait() and result)


def completed_work(result: list[torch.Tensor]) -> dist.Work:
    """A work that is done."""
    work = ZipCCLWork(result)
    work._future_devices = list({tensor.device for tensor in result if tensor.is_cuda})
    work.complete()
    return work


def in_mode_of_caller(call: Callable[[], None]) -> Callable[[], None]:
    """A call that another thread makes, without autograd, and in inference mode where this thread is."""
    inference = torch.is_inference_mode_enabled()

    def in_mode() -> None:
        with torch.inference_mode(inference), torch.no_grad():
            call()

    return in_mode

"""Threads that a process does not wait for when it exits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any


class DaemonThreads(Executor):
    """Executor whose threads do not keep the process alive.

    At exit, Python waits for the threads of a ThreadPoolExecutor, even if one of them is in a read
    of a disk that does not answer.

    Args:
        count: Number of threads.
        name: Prefix of their names.
    """

    def __init__(self, count: int, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads = []
        for number in range(count):
            thread = Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        """Call a function as soon as a thread is idle, and return the future of its result."""
        future: Future[Any] = Future()
        self._calls.put((future, partial(function, *args, **options)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads after the submitted calls.

        Args:
            wait: Whether to wait for the threads.
            cancel_futures: Whether to cancel the calls that have not started.
        """
        while cancel_futures:
            try:
                call = self._calls.get_nowait()
            except Empty:
                break
            if call is not None:
                call[0].cancel()
        # Each thread takes one of these and ends.
        for _ in self._threads:
            self._calls.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, work = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:  # raised where the result is read
                future.set_exception(error)
            else:
                future.set_result(result)
            # Otherwise the arguments would stay alive until the next call.
            del call, future, work

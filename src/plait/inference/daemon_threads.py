"""Threads that a process does not wait for when it ends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any


class DaemonThreads(Executor):
    """Runs calls on `count` threads. Those of a ThreadPoolExecutor are waited for at the end of the
    process, also one in a read of a disk that does not answer.
    """

    def __init__(self, count: int, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads = [
            Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        """Run it as soon as a thread is free."""
        future: Future[Any] = Future()
        self._calls.put((future, partial(function, *args, **options)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads when they have done what was submitted, or, with `cancel_futures`, what
        they are at.
        """
        while cancel_futures:
            try:
                call = self._calls.get_nowait()
            except Empty:
                break
            if call is not None:
                call[0].cancel()
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, work = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:  # it is whoever waits for the result that has to know
                future.set_exception(error)
            else:
                future.set_result(result)
            del call, future, work  # what they hold is not kept until the next call

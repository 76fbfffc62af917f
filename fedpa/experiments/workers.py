"""Parallel runs: worker processes that end with the command."""

import concurrent.futures
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax

from fedpa.engines import configure
from fedpa.engines.machine import count_cores
from fedpa.errors import FedpaError
from fedpa.experiments.config import RunConfig
from fedpa.experiments.tasks.task import TaskOptions, task_named
from fedpa.training.callbacks import Answer, Callback, Event, Stop
from fedpa.training.problem import Problem

SMALL = 100_000
"""Largest number of parameters of a model whose programs leave cores idle."""

WAITING = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""Signals of Ctrl-C, of schedulers before they kill, and of a closed terminal."""

Work = Callable[[Any, Problem, Callback], Any]
"""(what is to be done, the task, a callback that ends the run if the command does) → outcome. A
function of a module: its name is sent to the process."""
Submit = Callable[[Work, Any, RunConfig], "concurrent.futures.Future[Any]"]
"""(work, what is to be done, the run's settings) → what will come of it; None if it was ended."""


def default_jobs(problem: Problem) -> int:
    """Choose the number of jobs: 1 if compiled programs use all cores, otherwise half the cores."""
    shapes = eqx.filter_eval_shape(problem.init, jax.random.key(0))
    leaves = jax.tree.leaves(eqx.filter(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct)))
    parameters = sum(leaf.size for leaf in leaves)
    return 1 if parameters > SMALL else max(count_cores() // 2, 1)


@contextlib.contextmanager
def workers(jobs: int) -> Iterator[Submit]:
    """Start worker processes for `jobs` runs at a time.

    Only the command handles signals: it tells its workers, which save their last round and stop. If
    it is killed they end at once; their runs can be resumed.
    """
    context = multiprocessing.get_context("spawn")  # JAX's threads don't survive a fork
    stop = context.Event()
    pool = concurrent.futures.ProcessPoolExecutor(jobs, context, _initialize, (stop,))

    def submit(work: Work, item: Any, config: RunConfig) -> "concurrent.futures.Future[Any]":
        with hold_back_signals():  # also from the process that begins here, until it ignores them
            return pool.submit(_work, work, item, config)

    try:
        yield submit
    except concurrent.futures.process.BrokenProcessPool:
        raise FedpaError(
            "a worker process was killed, maybe for lack of memory: give fewer --jobs"
        ) from None
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


_stop: Any = None
_problems: dict[TaskOptions, Problem] = {}


def _initialize(stop: Any) -> None:
    global _stop
    _stop = stop
    configure()
    for number in WAITING:
        signal.signal(number, signal.SIG_IGN)
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)  # files are complete at any time


def _work(work: Work, item: Any, config: RunConfig) -> Any:
    def look(event: Event) -> Answer:
        return Stop("interrupted", finished=False) if _stop.is_set() else None

    if _stop.is_set():
        return None
    options = config.task_options
    if options not in _problems:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the command has said it
            _problems[options] = task_named(config.task).load(options)
    return work(item, _problems[options], look)


@contextlib.contextmanager
def hold_back_signals() -> Iterator[None]:
    """The system keeps signals until the block is done; processes that begin in it never get them.

    (Unless they ask for it. Where there is no such mask, as on Windows, nothing is held back.)
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WAITING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

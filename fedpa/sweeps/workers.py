"""Trials side by side: processes that belong to the sweep and end with it."""

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

from fedpa.cores import cores
from fedpa.errors import FedpaError
from fedpa.sweeps.search import Outcome
from fedpa.sweeps.trial_run import Job, performed
from fedpa.tasks.options import TaskOptions
from fedpa.tasks.task import Problem, task_named
from fedpa.training.callbacks import Answer, Event, Stop
from fedpa.training.signals import WAITING

SMALL = 100_000
"""Parameters of a model whose programs leave cores idle."""

Submit = Callable[[Job], "concurrent.futures.Future[Outcome | None]"]


def default_jobs(problem: Problem) -> int:
    """One where compiled programs use all cores themselves, or where there are few; else half."""
    shapes = eqx.filter_eval_shape(problem.init, jax.random.key(0))
    leaves = jax.tree.leaves(eqx.filter(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct)))
    parameters = sum(leaf.size for leaf in leaves)
    return 1 if parameters > SMALL else max(cores() // 2, 1)


@contextlib.contextmanager
def workers(jobs: int) -> Iterator[Submit]:
    """Processes of their own for so many trials at a time.

    Signals are the sweep's business: it tells its workers, which save their last round and stop.
    If it is killed they end at once; their trials are resumed like others.
    """
    context = multiprocessing.get_context("spawn")  # JAX's threads don't survive a fork
    stop = context.Event()
    pool = concurrent.futures.ProcessPoolExecutor(jobs, context, _initialize, (stop,))
    try:
        yield lambda job: pool.submit(_work, job)
    except concurrent.futures.process.BrokenProcessPool:
        raise FedpaError(
            "a worker process was ended from outside (is there memory for fewer --jobs?)"
        ) from None
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


_stop: Any = None
_problems: dict[TaskOptions, Problem] = {}


def _initialize(stop: Any) -> None:
    global _stop
    _stop = stop
    for number in WAITING:
        signal.signal(number, signal.SIG_IGN)
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)  # files are whole at any time


def _work(job: Job) -> Outcome | None:
    def look(event: Event) -> Answer:
        return Stop("interrupted", finished=False) if _stop.is_set() else None

    if _stop.is_set():
        return None
    options = job.config.task_options
    if options not in _problems:
        _problems[options] = task_named(job.config.task).load(options)
    return performed(job, _problems[options], [look])

"""What engines ask of the machine, and what they refuse."""

import ctypes
import platform
import re
import resource
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedpa
from fedpa import FedpaError, LocalTraining, Server, server
from fedpa.engines import EngineOptions, machine
from fedpa.engines.distributed import join
from fedpa.engines.options import Processes
from tests.engines.federation import built, train

HERE = len(jax.devices())


@pytest.fixture(autouse=True)
def _engines_of_their_own():
    """An engine remembers what did not fit: the others shall not know of these machines."""
    built.cache_clear()
    yield
    built.cache_clear()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"devices": HERE + 1}, f"devices = {HERE + 1}: .* {HERE} .*force_host"),
        ({"devices": 0}, "devices = 0: must be a whole number, at least 1"),
        ({"device": "abacus"}, "device = 'abacus': .*cpu"),
        ({"workers": 0}, "workers = 0"),
        ({"clients_in_flight": -1}, "clients_in_flight = -1"),
        ({"matmul_precision": "best"}, "matmul_precision = 'best'"),
    ],
)
@pytest.mark.parametrize("engine", ["local", "sharded"])
def test_options_are_checked_first(engine, options, says):
    with pytest.raises(FedpaError, match=says):
        fedpa.engines.ENGINES[engine](EngineOptions(**options))


def test_options_in_use():
    fit = train("local", "fedavg", device="cpu", devices=1, matmul_precision="highest")
    assert len(fit.history) == 2


def train_wide(**options):
    """Eight clients of 40,000 numbers each."""
    clients = {str(i): {"x": np.ones((20, 2000), np.float32), "y": np.ones(20)} for i in range(8)}
    local = LocalTraining(optax.sgd(1e-4), batch_size=10, epochs=2)
    method = fedpa.fedpa(local, Server(server.sgd(1.0)), rho=0.1)
    engine = fedpa.engines.vectorized(EngineOptions(**options))
    return fedpa.fit(
        loss, jnp.zeros(2000), clients, method, rounds=1, clients_per_round=8, engine=engine
    )


def test_what_does_not_fit_is_refused_with_what_would(monkeypatch):
    monkeypatch.setattr(machine, "count_free_bytes", lambda device: 2_500_000)
    with pytest.raises(FedpaError, match=r"GiB free; clients_in_flight = [1-9]") as caught:
        train_wide(clients_in_flight=8, workers=2)
    lanes, workers = map(int, re.findall(r" = (\d+)", str(caught.value)))
    assert lanes * workers >= 4
    assert len(train_wide(clients_in_flight=lanes, workers=workers).history) == 1


@pytest.mark.long
def test_left_alone_the_engine_takes_fewer_clients_at_a_time(monkeypatch):
    monkeypatch.setattr(machine, "count_free_bytes", lambda device: 1_000_000)
    assert len(train_wide().history) == 1


def test_a_client_too_large_for_the_machine(monkeypatch):
    monkeypatch.setattr(machine, "count_free_bytes", lambda device: 100)
    with pytest.raises(FedpaError, match=r"one client alone needs .* fewer samples"):
        train("local", "fedpa")


def test_memory_is_read_from_the_machine():
    free = machine.count_free_bytes(jax.devices()[0])
    assert free is None or 2**20 < free < 2**50


def test_configure_keeps_programs_in_the_users_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = ("jax_compilation_cache_dir", "jax_compilation_cache_max_size")
    names += ("jax_persistent_cache_min_compile_time_secs", "jax_cpu_enable_async_dispatch")
    before = {name: jax.config.values[name] for name in names}
    try:
        fedpa.configure()
        kept = before["jax_compilation_cache_dir"]
        assert jax.config.jax_compilation_cache_dir == kept  # the user's own setting stays
        jax.config.update("jax_compilation_cache_dir", None)
        fedpa.configure(cached=False)
        assert jax.config.jax_compilation_cache_dir is None
        fedpa.configure()
        assert jax.config.jax_compilation_cache_dir == str(
            tmp_path / "fedpa" / "compiled" / "limited"
        )
        assert 0 < jax.config.jax_compilation_cache_max_size < 2**40
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc's thresholds are glibc's")
def test_configure_keeps_freed_memory_for_the_next_program():
    libc, size = ctypes.CDLL(None), 2**27
    libc.malloc.restype = ctypes.c_void_p

    def count_faults():
        block = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(size)))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        ctypes.memset(block, 1, size)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        libc.free(block)
        return after - before

    fedpa.configure(cached=False)
    count_faults()
    assert count_faults() < size / resource.getpagesize() / 10


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("nowhere", 2, 0), "coordinator = 'nowhere': must be host:port"),
        (("host:1", 2, None), "process_id = None: .*needed together"),
        (("host:1", 2, 2), "process_id = 2: must be below num_processes = 2"),
        (("host:1", 0, 0), "num_processes = 0"),
        (("127.0.0.1:9", 2, 1, 1), "coordinator = '127.0.0.1:9': could not be reached within 1 s"),
    ],
)
def test_processes_are_checked(given, says):
    with pytest.raises(FedpaError, match=says):
        join(Processes(*given))


INTERRUPTED = """
import jax.numpy as jnp, numpy as np, optax, fedpa, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where tests run in background
def tell(event):
    print("round", event.round, threading.active_count(), flush=True)
clients = {f"c{i}": {"x": np.ones((200, 50), np.float32), "y": np.zeros(200, np.float32)}
           for i in range(400)}
local = fedpa.LocalTraining(optax.sgd(1e-4), batch_size=1, epochs=20)
try:
    fedpa.fit(lambda p, b, k: (b["x"] @ p - b["y"]) ** 2, jnp.ones(50), clients,
              fedpa.fedavg(local, fedpa.Server(fedpa.server.sgd(1.0))),
              rounds=10_000, clients_per_round=400, callbacks=[tell],
              engine=fedpa.engines.vectorized(fedpa.engines.EngineOptions(workers=2)))
except KeyboardInterrupt:
    frames = sys._current_frames()
    pool = [t for t in threading.enumerate() if "fedpa-clients" in t.name]
    # An idle thread of a pool waits for work in its outermost function.
    busy = [t.name for t in pool if frames[t.ident].f_code.co_name != "_worker"]
    print(len(pool), "threads, busy:", busy, flush=True)
"""


def test_ctrl_c_abandons_the_round(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline().startswith("round 1 ")
        time.sleep(0.1)  # somewhere in a later round
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert rest.splitlines()[-1] == "2 threads, busy: []"
    assert process.returncode == 0


def loss(params, batch, key):
    return (batch["x"] @ params - batch["y"]) ** 2


def run_with(loss):
    clients = {"a": {"x": np.ones((4, 3), np.float32), "y": np.zeros(4, np.float32)}}
    local = LocalTraining(optax.sgd(0.1), batch_size=2)
    method = fedpa.fedavg(local, Server(server.sgd(1.0)))
    return fedpa.fit(loss, jnp.ones(3), clients, method, rounds=1, clients_per_round=1)


def branches(params, batch, key):
    if params[0] > 0:
        return loss(params, batch, key)
    return -loss(params, batch, key)


KEPT = []


def keeps(params, batch, key):
    KEPT.append(loss(params, batch, key))
    return sum(KEPT)


def draws(params, batch, key):
    return loss(params, batch, key) * np.float32(np.random.default_rng().random())


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (branches, r"loss can't be compiled: it needs the values .*test_machine.py, line \d+: if "),
        (keeps, "loss is another function at every call: .*a list"),
        (draws, "loss is another function at every call: it has randomness"),
    ],
)
def test_side_effects_that_break_tracing_are_refused(function, says):
    with pytest.raises(FedpaError, match=says):
        run_with(function)
    KEPT.clear()
    assert len(run_with(loss).history) == 1

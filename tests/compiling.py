"""How programs that run only once or twice are compiled; and programs in two threads."""

import subprocess
import sys

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""`jax.jit(f, compiler_options=QUICK)`: less optimization is sooner done.

For what is true of a function however it is compiled. What is true to the last digits only, and
whole runs, are tested as users get them.
"""


def run_in_two_threads(program: str) -> None:
    """Call compiled functions in two threads of a process of its own, which must end.

    program: the source that defines `calls`, functions without arguments.
    """
    subprocess.run([sys.executable, "-c", _BEFORE + program + _AFTER], check=True, timeout=240)


_BEFORE = """
import functools, threading
import jax, jax.numpy as jnp, numpy as np
rng = np.random.default_rng(0)
"""
_AFTER = """
for call in calls:
    jax.block_until_ready(call())
    work = lambda: [jax.block_until_ready(call()) for _ in range(60)]
    threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
"""

"""How programs that run only once or twice are compiled."""

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""`jax.jit(f, compiler_options=QUICK)`: less optimization is sooner done.

For what is true of a function however it is compiled. What is true to the last digits only, and
whole runs, are tested as users get them.
"""

"""Where a run's records go beside `metrics.jsonl`. One file each, found by name."""

from fedpa.training.loggers.logger import Logger, Write, check_loggers, loggers

__all__ = ["Logger", "Write", "check_loggers", "loggers"]

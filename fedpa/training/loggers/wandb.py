"""Weights & Biases. `WANDB_MODE`, `WANDB_PROJECT` and its other variables say where and how."""

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpa.training.loggers.logger import (
    Logger,
    Write,
    forgive,
    import_library,
    recall,
    remember,
    select_new,
)

NAME = "wandb"
PATIENCE = 300.0
"""Seconds to wait for uploads after the run; wandb alone would wait for a lost server for ever."""


def _check() -> None:
    import_library("wandb", "fedpa[wandb]")


@contextlib.contextmanager
def _opened(
    out: Path, config: Mapping[str, Any], past: Sequence[Mapping[str, Any]]
) -> Iterator[Write]:
    """A W&B run, the same one whenever the run is resumed. Charts are drawn over "round".

    W&B's own steps only ever grow and rows once sent are closed, but what comes after the last
    round bears its number too: so the round is a number of each row, declared to be their axis.

    Offline, every opening makes another directory, all of the same id. Each is told the whole past,
    so that the last one is all there is to sync: that of a killed run lacks what wandb had not
    written yet, which may be everything, and syncing does not join several into one run.
    """
    wandb = import_library("wandb", "fedpa[wandb]")
    known = recall(out, NAME).get("id")
    identity = known or secrets.token_hex(8)
    offline = os.environ.get("WANDB_MODE") == "offline"
    # Where there is a server, the run may have got another name since.
    named = "WANDB_NAME" in os.environ or (known is not None and not offline)
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or "fedpa",
        dir=str(out),
        id=identity,
        name=None if named else out.absolute().name,
        # Offline there is no server to ask for the run, which wandb would warn of.
        resume=None if offline else "allow",
        config=dict(config),
        reinit="create_new",  # a run that the caller may have open is theirs
        settings=_settings(wandb),
    )
    code = 1
    try:
        remember(out, NAME, {"id": identity})
        run.define_metric("round")
        run.define_metric("*", step_metric="round")
        told = _told(dict(run.summary))

        def write(record: Mapping[str, Any]) -> None:
            if values := select_new(record, told):
                run.log({"round": record["round"], **values})
                told.update(dict.fromkeys(values, record["round"]))

        for record in past:
            write(record)
        yield write
        code = 0
    except KeyboardInterrupt:
        code = 255  # as wandb has it
        raise
    finally:
        run.finish(exit_code=code)


def _told(summary: Mapping[str, Any]) -> dict[str, int]:
    """The last round of each metric that the server has, if it has the run: all up to its last row.

    What is measured after the last round may be of an earlier end, before the run was prolonged.
    """
    names = [name for name in summary if not name.startswith("test/")]
    return dict.fromkeys(names, summary.get("round", 0))


def _settings(wandb: Any) -> Any:
    """Bounded patience, where this version of wandb can have it and no other was chosen."""
    able = "finish_timeout" in getattr(wandb.Settings, "model_fields", {})
    chosen = "WANDB_FINISH_TIMEOUT" in os.environ
    return wandb.Settings(finish_timeout=PATIENCE) if able and not chosen else None


LOGGER = Logger(
    "Weights & Biases (fedpa[wandb]), as WANDB_MODE and WANDB_PROJECT say",
    _check,
    forgive(NAME, _opened),
)

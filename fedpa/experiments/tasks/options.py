"""What a task lets its users choose beside the algorithm: data, model, how it is evaluated."""

import dataclasses
import math
from typing import Literal

from fedpa.errors import check_integer, refuse

EvalSplit = Literal["auto", "validation", "test"]


@dataclasses.dataclass(frozen=True)
class TaskOptions:
    """What is not given (None) is the task's own choice; each task says which it takes."""

    data_dir: str | None = None
    """Where the data set lies, unpacked or as downloaded; FEDPA_DATA or the user's data directory
    if not given."""
    dataset: str | None = None
    """Which of the task's data sets (see fedpa tasks); the first that is found if not given."""
    model: str | None = None
    """The task's model, where it has several (see fedpa tasks)."""
    max_examples: int | None = None
    """At most this many examples per client."""
    vocabulary: int | None = None
    """Vocabulary size."""
    tags: int | None = None
    """Number of tags."""
    words: int | None = None
    """Distinct words of an example that are kept."""
    groups: int | None = None
    """Groups of the group norm."""
    label_skew: float | None = None
    """Deal the training examples to as many clients again, with labels by Dirichlet draws of this
    concentration (0.1: most clients have one to three labels), instead of by whose they are."""
    partition_seed: int | None = None
    """Seed of the partition, where examples are dealt to clients."""
    validation_share: float | None = None
    """Share of the training clients held out for validation, where the data has no such split."""
    eval_split: EvalSplit = "auto"
    """What curves (eval/…) show: validation clients, or the test split; auto: validation if there
    is any."""
    eval_examples: int = 10_000
    """Examples of an evaluation during the run, of the first clients in a shuffled order that is
    always the same; at the end all of test are taken."""


ALWAYS = ("eval_split", "eval_examples")
"""Options of every task."""


def check_task_options(task: str, options: TaskOptions, takes: tuple[str, ...]) -> None:
    """Refuse what the task does not take, and values out of range."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name not in (*takes, *ALWAYS) and value is not None:
            known = f"it takes {', '.join(takes)}" if takes else "it takes none"
            raise refuse(field.name, value, f"does not apply to task {task}; {known}")
    for name in ("max_examples", "vocabulary", "tags", "words", "groups", "eval_examples"):
        if getattr(options, name) is not None:
            check_integer(name, getattr(options, name), 1)
    if options.partition_seed is not None:
        check_integer("partition_seed", options.partition_seed, 0)
    if options.eval_split not in ("auto", "validation", "test"):
        raise refuse("eval_split", options.eval_split, "must be auto, validation or test")
    skew = options.label_skew
    if skew is not None and not 0 < skew < math.inf:
        raise refuse("label_skew", skew, "must be a finite number > 0")
    share = options.validation_share
    if share is not None and not 0 <= share < 1:
        raise refuse("validation_share", share, "must be a share of the clients, in [0, 1)")

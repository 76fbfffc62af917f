"""The round loop: Algorithm 1 from the outside.

cohort → broadcast → clients (engine) → aggregate → server update → callbacks → snapshot
"""

import functools
import hashlib
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpa.algorithms.fedopt import Algorithm, ClientState, Reading, State
from fedpa.data.federated import FederatedData, check_when_read
from fedpa.data.views import read_ahead
from fedpa.engines.engine import Cohort, Engine, RoundResult, num_bytes
from fedpa.engines.local import local
from fedpa.errors import FedpaError, NoUsableClientError, TooFewClientsError, check_integer, refuse
from fedpa.metrics.metric import lower_is_better
from fedpa.server.aggregation import check_cohort
from fedpa.training.callbacks import (
    SWITCH,
    Callback,
    Event,
    Stop,
    Watching,
    call_callbacks,
    initial_memories,
    stop_at_plateau,
)
from fedpa.training.history import SECRET, History, Record
from fedpa.training.named_arrays import is_array
from fedpa.training.privacy import (
    check_private,
    choose_cohorts,
    make_private_server,
    run_without_clients,
    track_privacy,
)
from fedpa.types import Key, Keys, Model, Params


class Fit(NamedTuple):
    """The result of a run; `print` shows a summary of at most ten lines.

    Args:
        params: The model as it was given, with the parameters of the last round.
        history: One record per round, as in `metrics.jsonl`; `history.to_pandas()` makes a table of
            it.
        state: The algorithm's server state.
        stopped: Why a callback ended the run early (default: None).
        finished: Whether it is over; if not, it can be resumed (default: True).
        best: The best round, `{"metric": …, "value": …, "round": …}`, where one is chosen (default:
            None).
        label: What the run is called (default: "").
        out: The directory that records it (default: None).
        client_states: What each client keeps, by its id, where the method has clients keep
            something and they are in this process (default: nothing).
    Example:
        >>> record = {"round": 1, "phase": "training", "seconds": 0.5, "train/loss": 2.0}
        >>> record |= {"train/rejected": 0, "comm/bytes_up": 80, "comm/bytes_down": 80}
        >>> print(Fit(np.zeros(10), History([record]), None, label="mine"))
        mine: 10 parameters
          rounds      1
          ended       after its last round
          train/loss  2 (best 2 in round 1)
          failures    none
          traffic     80 bytes up, 80 bytes down
          seconds     0.5
          recorded    no
    """

    params: Model
    history: History
    state: State
    stopped: str | None = None
    finished: bool = True
    best: Mapping[str, Any] | None = None
    label: str = ""
    out: Path | None = None
    client_states: Mapping[str, ClientState] = MappingProxyType({})

    def __repr__(self) -> str:
        """Summarize the run in at most ten lines."""
        phases = Counter(record["phase"] for record in self.history)
        counts = ", ".join(f"{count} of {phase}" for phase, count in phases.items())
        fields = {
            "rounds": f"{len(self.history)}" + (f": {counts}" if len(phases) > 1 else ""),
            "ended": (self.stopped or "after its last round")
            + ("" if self.finished else " (can be resumed)"),
            **describe_metrics(self.history, self.best),
            "failures": self._describe_failures(),
            "traffic": f"{format_bytes(self._total('comm/bytes_up'))} up, "
            f"{format_bytes(self._total('comm/bytes_down'))} down",
            "seconds": f"{self._total('seconds'):.3g}",
            "recorded": "no" if self.out is None else repr(str(self.out)),
        }
        return list_fields(f"{self.label or 'Fit'}: {count_parameters(self.params)}", fields)

    def _total(self, name: str) -> Any:
        return sum(record.get(name, 0) for record in self.history)

    def _describe_failures(self) -> str:
        failed = [record for record in self.history if record.get("train/rejected")]
        if not failed:
            return "none"
        count = self._total("train/rejected")
        return f"{count} client updates, in {len(failed)} of {len(self.history)} rounds"


METRIC_LINES = 3
"""Lines for metrics in the summary of a run."""


def describe_metrics(
    history: History, best: Mapping[str, Any] | None = None, most: int = METRIC_LINES
) -> dict[str, str]:
    """Format the last and the best value of the training loss and of each evaluation metric."""
    names = dict.fromkeys(name for record in history for name in record)
    evaluated = [name for name in names if name.startswith(("eval/", "valid/", "test/"))]
    chosen = None if best is None else best["metric"]
    evaluated.sort(key=lambda name: name != chosen)  # the tracked metric comes first
    shown = [*(["train/loss"] if "train/loss" in names else []), *evaluated]
    if len(shown) > most:
        left = len(shown) - most + 1
        texts = {name: _describe_metric(history, best, name) for name in shown[: most - 1]}
        return texts | {"…": f"{left} more metrics in the records"}
    return {name: _describe_metric(history, best, name) for name in shown}


def _describe_metric(history: History, best: Mapping[str, Any] | None, name: str) -> str:
    values = [(record[name], record["round"]) for record in history if name in record]
    last = f"{values[-1][0]:.4g}"
    if name.startswith("test/"):
        return last
    known = [(value, t) for value, t in values if value == value]
    if best is not None and best["metric"] == name:
        known = [(best["value"], best["round"])]
    if not known:
        return last
    sign = 1 if lower_is_better(name) else -1
    value, t = min(known, key=lambda point: sign * point[0])
    return f"{last} (best {value:.4g} in round {t})"


def list_fields(title: str, fields: Mapping[str, str]) -> str:
    """Format a title, and below it a line for each field."""
    width = max(map(len, fields)) + 2
    return "\n".join([title, *(f"  {name:<{width}}{text}" for name, text in fields.items())])


def count_parameters(tree: Any) -> str:
    size = sum(leaf.size for leaf in jax.tree.leaves(tree) if is_array(leaf))
    return f"{size:,} parameter{'s' if size != 1 else ''}"


def format_bytes(count: float) -> str:
    """Format a size with its unit, `1.2 MB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


class Snapshot(NamedTuple):
    """A run after one of its rounds: everything that later rounds depend on.

    Cohorts and keys are not stored, since they are functions of the seed and the round.
    """

    round: int
    """Rounds done."""
    state: State
    """The algorithm's server state: parameters, optimizer, averages."""
    params: Any
    """The parameters θ to evaluate and to return, from `algorithm.parameters`."""
    client_states: Mapping[str, ClientState]
    """States of the clients that took part, if they keep one."""
    history: History
    """The records of finished rounds, except `untold`; those after `round` are of later rounds."""
    memory: Mapping[str, Any]
    """States of `Remembering` callbacks, by name."""
    stopped: str | None = None
    """Why a callback ended the run, if one did."""
    untold: Record | None = None
    """The record of this round if its callbacks have not been called yet."""
    before_callbacks: "Snapshot | None" = None
    """For the last round: the run before its callbacks were called."""

    @property
    def stored(self) -> "Snapshot":
        """The snapshot that a checkpoint stores.

        The last round is always evaluated, so callbacks may act differently in it. An extended run
        calls them again for that round.
        """
        return self if self.before_callbacks is None else self.before_callbacks


Keep = Callable[[Snapshot], None]
"""Called after every round."""


def train(
    algorithm: Algorithm,
    theta: Params,
    data: FederatedData,
    *,
    rounds: int,
    clients_per_round: int,
    seed: int = 0,
    engine: Engine | None = None,
    min_success: float = 0.0,
    callbacks: Sequence[Callback] = (),
    assemble: Callable[[Params], Model] = lambda theta: theta,
    start: Snapshot | None = None,
    keep: Keep = lambda snapshot: None,
) -> Fit:
    """Run the rounds of an algorithm from θ: the loop behind `fedpa.fit`.

    Args:
        algorithm: A method made for an objective: `fedpa.fedavg(local, server)(objective)`.
        theta: Initial parameters, a pytree of floating-point arrays.
        data: The clients; `fedpa.data.from_mapping` makes them from arrays in memory.
        rounds: The total number of rounds, ≥ 1.
        clients_per_round: Clients drawn for each round without replacement, ≥ 1; on average, if the
            algorithm is private and samples them independently.
        seed: Determines cohorts and keys, 0 to 2³² − 1.
        engine: Where clients run; default: `fedpa.engines.local()`.
        min_success: Share of a round's clients, 0 to 1, that must give a usable result; with fewer,
            the run ends with an error.
        callbacks: Called after every round.
        assemble: θ → the model for callbacks and the result.
        start: The run after some of its rounds, to continue from.
        keep: Called after every round with the snapshot.
    Returns:
        Parameters, records and server state after the last round.
    Raises:
        FedpaError: A setting is out of range, data can't be used, or too few clients succeed.
    Example:
        >>> import fedpa
        >>> local, server = fedpa.LocalTraining(0.1, 4), fedpa.Server(fedpa.server.sgd(1.0))
        >>> algorithm = fedpa.fedavg(local, server)(fedpa.Objective(lambda p, z, key: (p - z) ** 2))
        >>> data = fedpa.data.from_mapping({"a": np.ones(4), "b": np.ones(8)})
        >>> result = train(algorithm, jnp.zeros(()), data, rounds=20, clients_per_round=2)
        >>> round(float(result.params), 2)
        1.0
    """
    check_counts(rounds, clients_per_round, seed)
    check_share("min_success", min_success)
    if not data.ids:
        raise FedpaError("data has no clients: give at least one")
    warn_of_few_clients(clients_per_round, len(data.ids))
    release, size = algorithm.release, min(clients_per_round, len(data.ids))
    check_cohort(algorithm.aggregation, "clients_per_round", size)
    if release is not None:
        callbacks = [*track_privacy(release, len(data.ids), size), *callbacks]
    data = check_when_read(data)
    engine = local() if engine is None else engine
    # The records, with what callbacks add to them, say when to switch.
    switch = algorithm.switch
    watch = [] if switch is None else [stop_at_plateau(switch.rule)]
    memories = initial_memories([*callbacks, *watch])
    now = start
    if now is None:
        now = Snapshot(0, algorithm.init(theta), theta, {}, History(), {})
    now = now._replace(memory=memories | dict(now.memory))
    more = now.stopped is None and now.round < rounds
    check_private(algorithm, len(data.ids), size, min_success, now.round, more)
    if switch is not None and now.memory[SWITCH]["round"] is not None:
        algorithm = switch.at(now.memory[SWITCH]["round"])
    broadcast, server = _compile_server(algorithm, seed, size)
    keeps_states = bool(jax.tree.leaves(jax.eval_shape(algorithm.client_init, theta)))
    if keeps_states:
        _warn_of_strangers(algorithm, theta, len(data.ids), clients_per_round, rounds)
    # Engines need only the largest number of examples of later cohorts.
    population = sorted({data.num_examples(name) for name in data.ids})
    warned = {name for record in now.history for name in record.get("train/rejected_clients", ())}

    draw = _choose_cohorts(algorithm, seed, data.ids, clients_per_round)
    is_secret = release is not None and release.ledger is not None

    def cohort_at(t: int) -> list[str]:
        return draw(t) if t < rounds else []

    following = cohort_at(now.round)
    begun: set[str] = set()

    def begin(t: int) -> str:
        """Find the phase of a round; announce it to callbacks before its first round."""
        phase = algorithm.phase(t)
        if phase not in begun:
            begun.add(phase)
            for callback in callbacks:
                if isinstance(callback, Watching):
                    callback.begin(t + 1, rounds, phase)
        return phase

    with read_ahead(data, whole_cohort=jax.process_count() == 1) as reading:

        def compute(now: Snapshot) -> Snapshot:
            """Compute the next round, without its callbacks."""
            nonlocal following
            t = now.round
            started, phase = time.perf_counter(), begin(t)
            ids, following = following, cohort_at(t + 1)
            reading.announce(ids, following)
            newcomers = {
                name: algorithm.client_init(theta) for name in ids if name not in now.client_states
            }
            cohort = Cohort(
                ids,
                reading.data.examples,
                client_keys(seed, t, ids),
                {**now.client_states, **newcomers},
                [data.num_examples(name) for name in ids],
                data.packed,
                population,
                t,
                None if release is None else size,
            )
            asked, state = _inquire(algorithm, engine, now.state, cohort)
            message = broadcast(state, jnp.asarray(t))
            client = algorithm.clients[phase]
            if ids:
                result = engine(client, algorithm.aggregation, message, cohort)
            else:  # Poisson sampling
                result = run_without_clients(algorithm, client, message, theta, reading.data)
            _check_success(result, ids, t, min_success, algorithm.reading)
            state, info = server(state, result.aggregate, jnp.asarray(t))

            record: Record = {"round": t + 1, "phase": phase, "seconds": 0.0}
            if switch is not None and now.memory[SWITCH]["round"] == t:
                record["switch/round"] = t
            if is_secret:
                record[SECRET] = True
            else:
                record |= _train_metrics(result, ids, algorithm.reading)
                record |= _traffic(message, result, asked)
                _report_outliers(record, result, ids, warned)
            record |= _server_metrics(info)
            _report(record, result, ids, warned, algorithm.reading)
            _check_progress(record, now.history, rounds, result, ids, algorithm.reading)
            record["seconds"] = time.perf_counter() - started
            # If the server skipped the round, clients keep their earlier states, too.
            states = {} if info.skipped else result.states
            return Snapshot(
                t + 1,
                state,
                algorithm.parameters(state),
                {**now.client_states, **states} if keeps_states else {},
                now.history,
                now.memory,
                untold=record,
            )

        def tell(now: Snapshot) -> tuple[Snapshot, Stop | None]:
            """Call the callbacks of a computed round; switch to another algorithm after it."""
            nonlocal algorithm, broadcast, server
            assert now.untold is not None
            t, record, last = now.round, dict(now.untold), now.round == rounds
            took_part = () if is_secret else cohort_at(t - 1)
            event = Event(t, rounds, assemble(now.params), now.state, record, took_part)
            memory, stop = call_callbacks(callbacks, event, now.memory)
            if switch is not None:
                memory |= {one.name: one.update(memory[one.name], event)[0] for one in watch}
                if memory[SWITCH]["round"] == t:
                    algorithm = switch.at(t)
                    broadcast, server = _compile_server(algorithm, seed, size)
                    begun.clear()  # whose programs are compiled now
            history = History(now.history) if last else now.history
            history.append(record)
            told = now._replace(
                history=history,
                memory=memory,
                stopped=stop.reason if stop is not None and stop.finished else None,
                untold=None,
                before_callbacks=now if last else None,
            )
            return told, stop

        while now.stopped is None and (now.untold is not None or now.round < rounds):
            now, stop = tell(compute(now) if now.untold is None else now)
            keep(now)
            if stop is not None:
                return _make_fit(now, assemble, stop.reason, stop.finished)
    if switch is not None and now.memory[SWITCH]["round"] is None and now.stopped is None:
        warnings.warn(
            f"no plateau of {switch.rule.metric} in {now.round} rounds: nothing switched. Raise "
            "rounds or shorten the window of the plateau",
            stacklevel=3,
        )
    return _make_fit(now, assemble, now.stopped)


def _make_fit(
    now: Snapshot, assemble: Callable[[Params], Model], stopped: str | None, finished: bool = True
) -> Fit:
    params = assemble(now.params)
    return Fit(params, now.history, now.state, stopped, finished, client_states=now.client_states)


def _warn_of_strangers(
    algorithm: Algorithm, theta: Params, population: int, per_round: int, rounds: int
) -> None:
    """Warn if clients keep states but rarely take part twice."""
    times = rounds * per_round / population
    if times >= LEAST_TIMES:
        return
    met = population * (1 - (1 - per_round / population) ** rounds)
    size = num_bytes(jax.eval_shape(algorithm.client_init, theta))
    warnings.warn(
        f"a client takes part {times:.2g} times on average ({per_round} of {population:,} in each "
        f"of {rounds:,} rounds), and this method keeps a state for each: most states will never be "
        "used again or be out of date, and most clients start with a new one (for SCAFFOLD this is "
        f"FedAvg). About {met:,.0f} states, {met * size / 1e6:,.3g} MB, are kept in memory and in "
        "every checkpoint",
        stacklevel=3,
    )


LEAST_TIMES = 2
"""How often clients that keep a state should take part, on average."""


def warn_of_few_clients(clients_per_round: int, clients: int) -> None:
    """Warn if a round would take more clients than there are."""
    if clients_per_round > clients:
        warnings.warn(
            f"clients_per_round = {clients_per_round}: there are only {clients} clients, all take "
            "part in every round",
            stacklevel=3,
        )


def check_counts(rounds: Any, clients_per_round: Any, seed: Any) -> None:
    check_integer("rounds", rounds, 1)
    check_integer("clients_per_round", clients_per_round, 1)
    check_integer("seed", seed, 0)
    if seed >= 2**32:
        raise refuse("seed", seed, "must be between 0 and 2³² − 1")


def check_share(field: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise refuse(field, value, "must be a share between 0 and 1")


def _check_success(
    result: RoundResult, ids: Sequence[str], t: int, least: float, reading: Reading
) -> None:
    succeeded = int(result.accepted.sum())
    if ids and succeeded / len(ids) < least:
        raise TooFewClientsError(
            f"round {t + 1}: {succeeded} of {len(ids)} clients succeeded, min_success = {least} "
            f"requires more; {_explain(result, ids, _list_rejected(result, ids)[0], reading)}"
        )


def _list_rejected(result: RoundResult, ids: Sequence[str]) -> list[str]:
    return [name for name, ok in zip(ids, result.accepted, strict=True) if not ok]


def _explain(result: RoundResult, ids: Sequence[str], client: str, reading: Reading) -> str:
    return f"client {client!r}: {_find_reason(result, ids, client, reading) or NOT_FINITE}"


def _find_reason(
    result: RoundResult, ids: Sequence[str], client: str, reading: Reading
) -> str | None:
    """What went wrong with a client, if more is known than that its result is not finite."""
    if client in result.failures:
        return result.failures[client]
    place = list(ids).index(client)
    for name, reason in reading.reasons.items():
        if name in result.infos and result.infos[name][place]:
            return reason
    return None


def _check_progress(
    record: Record,
    history: History,
    rounds: int,
    result: RoundResult,
    ids: Sequence[str],
    reading: Reading,
) -> None:
    """End a run that had no usable client update so far."""
    t = record["round"]
    skipped = [*(past.get("train/skipped") for past in history), record["train/skipped"]]
    if t < min(rounds, FRUITLESS) or not all(skipped):
        return
    rejected = record.get("train/rejected_clients", ())
    if rejected:
        failed = next((name for name in rejected if name in result.failures), rejected[0])
        reason = _explain(result, ids, failed, reading)
    elif not result.examples.any():
        reason = f"client {ids[0]!r} and all others of round {t} have no examples"
    else:
        reason = reading.reasons.get("skipped", SKIPPED)
    since = "round 1 had" if t == 1 else f"rounds 1 to {t} had"
    raise NoUsableClientError(f"{since} no usable client update, the model is unchanged; {reason}")


FRUITLESS = 5
"""Number of first rounds without a usable client update after which a run fails; a shorter run
fails after its last."""
SKIPPED = "the server's update is not finite: lower the learning rate"
NOT_FINITE = (
    "its update is not finite. Lower the learning rate, or check its data for missing values"
)


def _train_metrics(result: RoundResult, ids: Sequence[str], reading: Reading) -> dict[str, Any]:
    """Average over accepted clients; count and name the rejected ones."""
    reductions: dict[str, Callable[[np.ndarray], Any]]
    reductions = {"mean": np.mean, "max": np.max, "min": np.min, "sum": np.sum}
    counted = result.accepted & (result.examples > 0)
    metrics: dict[str, Any] = {
        f"train/{name}": float(
            reductions[reading.reduce.get(name, "mean")](values[counted].astype(np.float64))
        )
        if counted.any()
        else float("nan")
        for name, values in result.infos.items()
    }
    rejected = _list_rejected(result, ids)
    metrics["train/rejected"] = len(rejected)
    metrics["train/empty"] = int((result.examples == 0)[result.accepted].sum())
    if rejected:
        metrics["train/rejected_clients"] = rejected
    return metrics


OUTLIER = 100
"""How many times as long as the cohort's median an update is that is counted and named."""


def _report_outliers(
    record: dict[str, Any], result: RoundResult, ids: Sequence[str], warned: set[str]
) -> None:
    """Count the updates that are far longer than the others; warn once of each client's."""
    norms = result.infos.get("delta_norm")
    if norms is None:
        return
    counted = result.accepted & (result.examples > 0)
    usual = float(np.median(norms[counted])) if counted.any() else 0.0
    is_outlier = counted & (norms > OUTLIER * usual) & (usual > 0)
    places = np.flatnonzero(is_outlier).tolist()
    record["train/outliers"] = len(places)
    for place in places:
        if f"outlier {ids[place]}" not in warned:
            warned.add(f"outlier {ids[place]}")
            warnings.warn(
                f"round {record['round']}: client {ids[place]}: its update is "
                f"{norms[place] / usual:,.3g} times as long as the cohort's median (later ones of "
                "the same client are counted only). A robust aggregation bounds what it can do",
                stacklevel=3,
            )


def _server_metrics(info: Any) -> dict[str, Any]:
    """Format `train/skipped` and further numbers of the method's server."""
    values = jax.device_get(info)._asdict().items()
    metrics = {f"train/{name}": float(value) for name, value in values if value is not None}
    return metrics | {"train/skipped": int(info.skipped)}


def _inquire(
    algorithm: Algorithm, engine: Engine, state: Any, cohort: Cohort
) -> tuple[RoundResult | None, Any]:
    """Make the inquiry, if the algorithm has one; return the server's state with the answers."""
    inquiry = algorithm.inquiry
    if inquiry is None:
        return None, state
    result = engine(inquiry.client, algorithm.aggregation, inquiry.broadcast(state), cohort)
    return result, jax.jit(inquiry.receive)(state, result.aggregate)


def _traffic(message: Any, result: RoundResult, asked: RoundResult | None) -> dict[str, int]:
    """Count the bytes of the whole cohort: measured, or message down and result and weight up.

    The inquiry's message down is part of the message that follows.
    """
    clients = len(result.accepted)
    up, down = clients * result.bytes_up, clients * num_bytes(message)
    if result.traffic is not None:
        up, down = result.traffic
    if asked is not None:
        up += clients * asked.bytes_up if asked.traffic is None else asked.traffic.up
        down += 0 if asked.traffic is None else asked.traffic.down
    return {"comm/bytes_up": up, "comm/bytes_down": down}


def _report(
    record: dict[str, Any],
    result: RoundResult,
    ids: Sequence[str],
    warned: set[str],
    reading: Reading,
) -> None:
    """Warn once of each rejected client, and once of a skipped round. Records have all of them."""
    news = [name for name in record.get("train/rejected_clients", ()) if name not in warned]
    later = "(later rejections of the same clients are counted only)"
    reasons = {name: _find_reason(result, ids, name, reading) for name in news}
    not_finite = [name for name in news if reasons[name] is None]
    if not_finite:
        warnings.warn(
            f"round {record['round']}: rejected because of non-finite results: "
            f"{', '.join(map(str, not_finite))} {later}",
            stacklevel=3,
        )
    for name in news:
        if reasons[name] is not None:
            warnings.warn(
                f"round {record['round']}: rejected, client {name}: {reasons[name]} {later}",
                stacklevel=3,
            )
    warned.update(news)
    if record["train/skipped"] and "" not in warned:
        warnings.warn(
            f"round {record['round']}: no usable client update, model left unchanged (shown once)",
            stacklevel=3,
        )
        warned.add("")


# The cohort is a function of (seed, round), so all methods with one seed have the same cohorts.
# A client's key is a function of (seed, round, a stable hash of its id), not of the cohort.
_COHORT, _CLIENT, NOISE = 0, 1, 2  # streams derived from one seed


def _choose_cohorts(
    algorithm: Algorithm, seed: int, ids: Sequence[str], size: int
) -> Callable[[int], list[str]]:
    """Make the function that draws the clients of a round."""
    release = algorithm.release
    if release is None or (release.budget.sampling == "fixed" and release.ledger is None):
        return lambda t: select_cohort(seed, t, ids, size)
    return choose_cohorts(release, (seed, _COHORT), ids, size)


def _compile_server(algorithm: Algorithm, seed: int, size: int) -> tuple[Any, Any]:
    """Compile what the server does: its broadcast and its step."""
    if algorithm.release is None:
        return jax.jit(algorithm.broadcast), jax.jit(algorithm.server)
    noise = jax.random.fold_in(_root(seed), NOISE)
    return jax.jit(algorithm.broadcast), make_private_server(algorithm, noise, size)


def select_cohort(seed: int, t: int, ids: Sequence[str], size: int) -> list[str]:
    """Draw the clients of round t (from 0) without replacement; all if there are too few."""
    if size >= len(ids):
        return list(ids)
    rng = np.random.default_rng([seed, _COHORT, t])
    return [ids[index] for index in rng.choice(len(ids), size, replace=False)]


def client_keys(seed: int, t: int, ids: Sequence[str]) -> Keys:
    """Make one key per client of the round."""
    keys: Keys = _keys_at(_root(seed), np.int32(t), client_hashes(ids))
    return keys


_root = functools.lru_cache(maxsize=64)(jax.random.key)


def client_hashes(ids: Sequence[str]) -> np.ndarray:
    """Hash ids to 64 bits each, (clients, 2), the same in every run."""
    digests = b"".join(map(_digest, ids))
    return np.frombuffer(digests, dtype="<u4").reshape(-1, 2)


@functools.lru_cache(maxsize=1 << 16)
def _digest(name: str) -> bytes:
    return hashlib.blake2b(str(name).encode(), digest_size=8).digest()


def keys_at(root: Key, t: Any, hashes: jax.Array) -> Keys:
    """Make the clients' keys of round t in compiled code; `root` is `jax.random.key(seed)`."""
    key = jax.random.fold_in(jax.random.fold_in(root, _CLIENT), t)
    return jax.vmap(lambda h: jax.random.fold_in(jax.random.fold_in(key, h[0]), h[1]))(hashes)


_keys_at = jax.jit(keys_at)

"""The search itself, with an objective that costs nothing: order, memory, kills, pruning."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpa import FedpaError
from fedpa.experiments.config import default_config, read_toml, resolve
from fedpa.experiments.sweeps import search as searching
from fedpa.experiments.sweeps.search import (
    JOURNAL,
    MOST,
    Outcome,
    Trial,
    begin_trial,
    choose_search,
    drop_cut_line,
    end_trial,
    find_best,
    open_journal,
    propose,
    read_trials,
)
from fedpa.experiments.sweeps.space import Interval, point, size
from fedpa.experiments.sweeps.sweep import (
    BEST,
    TABLE,
    Sweep,
    check_place,
    hold_directory,
    run_trials,
    write_settings,
)
from tests.experiments.sweeps.objective import done, outcome_of, value_of

LISTS = {"epochs": (1, 2, 5), "rho": (0.01, 0.1, 1.0)}
MIXED = {"epochs": Interval(1, 9), "rho": Interval(0.01, 1.0, True), "server_tau": (0.1, 0.2)}
BASE = default_config("digits", "fedpa")

pytestmark = pytest.mark.filterwarnings("ignore:samples = 1")  # some points have one epoch


def settings(kind, space, trials=None, seed=0, prune=False):
    return Sweep(BASE, space, choose_search(kind, space, trials, seed, prune))


KINDS = {
    "grid": settings("grid", LISTS),
    "random, choices": settings("random", LISTS, 6),
    "random, intervals": settings("random", MIXED, 6),
    "tpe": settings("tpe", MIXED, 14),
    "grid, pruned": settings("grid", LISTS, prune=True),
    "tpe, pruned": settings("tpe", MIXED, 14, prune=True),
}


class Killed(BaseException):
    """As good as SIGKILL: nothing of ours catches it."""


def run(out, sweep, kills=(), jobs=1):
    """The whole sweep; a kill is (trial number, before or after its run). How many were run."""
    kills, performed = list(kills), []

    def submit(trial, past, again):
        if (trial.number, "before") in kills:
            kills.remove((trial.number, "before"))
            raise Killed
        performed.append(trial.number)
        outcome = outcome_of(trial.params, past, sweep.search.prune)
        if (trial.number, "after") in kills:
            kills.remove((trial.number, "after"))
            raise Killed
        return done(outcome)

    while True:
        try:
            with hold_directory(out, sweep):
                return run_trials(sweep, out, submit, jobs), performed
        except Killed:
            continue


@pytest.mark.parametrize("name", KINDS)
def test_kills_change_nothing(name, tmp_path):
    sweep = KINDS[name]
    whole, performed = run(tmp_path / "whole", sweep)
    assert performed == list(range(sweep.search.trials))
    kills = [(0, "before"), (1, "after"), (1, "before"), (4, "after"), (4, "after")]
    cut, performed = run(tmp_path / "cut", sweep, kills)
    assert cut == whole
    for file in (TABLE, BEST):
        assert (tmp_path / "cut" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    assert sorted(set(performed)) == list(range(sweep.search.trials))
    again, performed = run(tmp_path / "cut", sweep)
    assert again == whole
    assert performed == []


@pytest.mark.parametrize("name", ["grid, pruned", pytest.param("tpe", marks=pytest.mark.long)])
def test_a_journal_cut_anywhere_is_gone_on_with(name, tmp_path):
    sweep = KINDS[name]
    whole, _ = run(tmp_path / "whole", sweep)
    content = (tmp_path / "whole" / JOURNAL).read_bytes()
    for cut in range(1, len(content), max(len(content) // 6, 1)):
        out = tmp_path / f"cut-{cut}"
        out.mkdir()
        write_settings(out, sweep)
        (out / JOURNAL).write_bytes(content[:cut])
        assert run(out, sweep)[0] == whole


def test_whole_lines_stay(tmp_path):
    path = tmp_path / "journal"
    drop_cut_line(path)
    path.write_bytes(b"one\ntwo\nthr")
    drop_cut_line(path)
    assert path.read_bytes() == b"one\ntwo\n"
    drop_cut_line(path)
    assert path.read_bytes() == b"one\ntwo\n"


def test_what_ended_writes_can_be_cut_and_repeated(tmp_path, monkeypatch):
    sweep = KINDS["grid, pruned"]
    study = open_journal(tmp_path)
    begin_trial(study, sweep.space, sweep.search)
    tell = study.tell
    monkeypatch.setattr(study, "tell", lambda *_: (_ for _ in ()).throw(Killed))
    outcome = outcome_of(read_trials(study)[0].params, (), True)
    with pytest.raises(Killed):
        end_trial(study, 0, outcome)
    monkeypatch.setattr(study, "tell", tell)
    assert read_trials(study)[0].state == "running"
    trial = end_trial(study, 0, outcome)
    assert (trial.state, trial.value, trial.curve) == ("finished", outcome.value, outcome.curve)


def test_side_by_side_random_trials_are_the_same(tmp_path):
    for name in ("grid", "random, choices", "random, intervals"):
        one, _ = run(tmp_path / f"{name} one", KINDS[name])
        three, _ = run(tmp_path / f"{name} three", KINDS[name], [(2, "after")], jobs=3)
        assert one == three


@given(st.integers(0, 2**32), st.sampled_from(["grid", "random"]))
def test_no_point_twice(seed, kind):
    search = choose_search(kind, LISTS, 9, seed)
    past = []
    for number in range(9):
        past.append(Trial(number, propose(LISTS, search, past), "finished", 0.0, {}))
    assert sorted(str(t.params) for t in past) == sorted(str(point(LISTS, n)) for n in range(9))


@given(st.integers(0, 2**31), st.sampled_from(["random", "tpe"]))
def test_proposals_are_inside_and_functions_of_the_seed(seed, kind):
    search = choose_search(kind, MIXED, 20, seed)
    past = [
        Trial(n, {"epochs": n + 1, "rho": 0.1 * (n + 1), "server_tau": 0.1}, "finished", -n, {})
        for n in range(3)
    ]
    params = propose(MIXED, search, past)
    assert params == propose(MIXED, search, past)
    assert isinstance(params["epochs"], int)
    assert 1 <= params["epochs"] <= 9
    assert 0.01 <= params["rho"] <= 1.0
    assert params["server_tau"] in (0.1, 0.2)
    other = search._replace(seed=seed + 1)
    assert params != propose(MIXED, other, past)


def test_tpe_learns(tmp_path):
    space = {"rho": Interval(1e-4, 100.0, True)}
    found, _ = run(tmp_path / "tpe", settings("tpe", space, 40))
    late = [trial.value for trial in found[25:]]
    assert sum(late) / len(late) > sum(t.value for t in found[:10]) / 10


def test_more_trials_extend_and_fewer_are_refused(tmp_path):
    short, _ = run(tmp_path, settings("random", MIXED, 3))
    long, performed = run(tmp_path, settings("random", MIXED, 5))
    assert long[:3] == short
    assert performed == [3, 4]
    with pytest.raises(FedpaError, match=r"search\.trials was 5 and is 4"):
        check_place(tmp_path, settings("random", MIXED, 4))


def test_other_settings_are_refused_with_what_differs(tmp_path):
    run(tmp_path, KINDS["grid"])
    for other, text in [
        (settings("grid", LISTS | {"rho": (0.01, 0.1)}), "space.rho was"),
        (settings("random", LISTS), "search.kind was 'grid' and is 'random'"),
        (KINDS["grid"]._replace(base=default_config("digits", "mean")), "run.method was"),
        (KINDS["grid, pruned"], "search.prune was"),
    ]:
        with pytest.raises(FedpaError) as refusal:
            check_place(tmp_path, other)
        assert text in str(refusal.value)


def test_one_process_at_a_time(tmp_path):
    with (
        hold_directory(tmp_path, KINDS["grid"]),
        pytest.raises(FedpaError, match="being written"),
        hold_directory(tmp_path, KINDS["grid"]),
    ):
        pass


def test_pruning_gives_up_the_poor_and_spares_the_rest(tmp_path):
    space = {"rho": tuple(float(n) for n in range(1, 11))}  # each worse than the one before
    found, _ = run(tmp_path / "worse", settings("grid", space, prune=True))
    assert [t.state for t in found[: searching.BEFORE_PRUNING]] == ["finished"] * 4
    assert {t.state for t in found[searching.BEFORE_PRUNING :]} == {"pruned"}
    assert all(t.value is None and t.about["rounds"] < 8 for t in found[4:])
    better = {"rho": tuple(reversed(space["rho"]))}
    found, _ = run(tmp_path / "better", settings("grid", better, prune=True))
    assert {t.state for t in found} == {"finished"}
    assert find_best(found).params == {"rho": 1.0}


def test_a_trial_without_a_number_is_not_the_best(tmp_path):
    sweep = settings("grid", {"rho": (0.1, 1.0)})
    study = open_journal(tmp_path)
    for value in (math.nan, -2.0):
        trial = begin_trial(study, sweep.space, sweep.search)
        end_trial(study, trial.number, Outcome(value, {}))
    found = read_trials(study)
    assert [t.state for t in found] == ["failed", "finished"]
    assert find_best(found).number == 1
    assert find_best(found[:1]) is None


def test_of_equals_the_first_is_the_best():
    equal = [Trial(n, {}, "finished", 0.5, {}) for n in range(3)]
    assert find_best(equal).number == 0


def test_the_best_configuration_is_one_that_fedpa_run_takes(tmp_path):
    found, _ = run(tmp_path, KINDS["grid"])
    config = resolve(read_toml(tmp_path / BEST))
    expected = max(found, key=lambda trial: value_of(trial.params))
    assert (config.hyperparameters.epochs, config.hyperparameters.rho) == tuple(
        expected.params.values()
    )


REFUSED = [
    (("nope", LISTS, None, 0), "search = 'nope': unknown search; choose from grid, random, tpe"),
    (("grid", MIXED, None, 0), "epochs is an interval"),
    (("grid", LISTS, 4, 0), "trials = 4: the grid has 9 points"),
    (("random", LISTS, 10, 0), "trials = 10: the space has only 9 points"),
    (("random", LISTS, 0, 0), "trials = 0"),
    (("tpe", LISTS, 3, -1), "search_seed = -1"),
    (("grid", {"epochs": tuple(range(1, MOST + 2))}, None, 0), "random or tpe"),
]


@pytest.mark.parametrize(("words", "text"), REFUSED)
def test_refused(words, text):
    with pytest.raises(FedpaError) as refusal:
        choose_search(*words)
    assert text in str(refusal.value)


def test_how_many_trials_if_not_said():
    assert choose_search("grid", LISTS, None, 0).trials == size(LISTS) == 9
    assert choose_search("random", LISTS, None, 0).trials == 9
    assert choose_search("random", MIXED, None, 0).trials == 20
    assert choose_search("tpe", LISTS, None, 0).trials == 20


@pytest.mark.long
def test_a_lock_that_a_kill_left_behind_is_released(tmp_path):
    sweep = KINDS["grid"]
    whole, _ = run(tmp_path / "whole", sweep)
    (tmp_path / "killed").mkdir()
    write_settings(tmp_path / "killed", sweep)
    (tmp_path / "killed" / f"{JOURNAL}.lock").touch()
    assert run(tmp_path / "killed", sweep)[0] == whole
    assert not (tmp_path / "killed" / f"{JOURNAL}.lock").exists()

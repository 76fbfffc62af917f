"""The benchmarks on small files in the real layouts: they run, and refuse what can't be trusted."""

import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpa.data.readers.hdf5 import write_hdf5
from fedpa.experiments.cli.main import main
from fedpa.experiments.tasks import TaskOptions, task_named
from fedpa.objectives.minibatches import Minibatch
from fedpa.training.checkpoint import list_checkpoints
from tests.data import tiny

WORDS = ["the", "a", "code", "loop", "list", "sort", "file", "tree", "error", "test"]
TAGS = ["python", "java", "c", "r"]


@pytest.fixture(autouse=True)
def _own_directories(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FEDPA_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def posts(n, seed=0):
    rng = np.random.default_rng(seed)
    sentences = [
        " ".join(rng.choice([*WORDS, "unheard-of"], rng.integers(0, 25))) for _ in range(n)
    ]
    tags = ["|".join(rng.choice([*TAGS, "rare"], rng.integers(1, 3))) for _ in range(n)]
    return {
        "tokens": np.array(sentences, object),
        "title": np.array(["the list"] * n, object),
        "tags": np.array(tags, object),
    }


def stackoverflow(directory, sizes=(3, 0, 1, 30)):
    """Clients without examples and with one are among them."""
    directory.mkdir(parents=True, exist_ok=True)
    for seed, split in enumerate(("train", "held_out", "test")):
        clients = [(f"user-{i}", posts(n, 10 * seed + i)) for i, n in enumerate(sizes)]
        write_hdf5(directory / f"stackoverflow_{split}.h5", clients)
    counted = "\n".join(f"{word} {99 - i}" for i, word in enumerate(WORDS))
    (directory / "stackoverflow.word_count").write_text(counted + "\n")
    counts = {tag: 9 - i for i, tag in enumerate(TAGS)}
    (directory / "stackoverflow.tag_count").write_text(json.dumps(counts))


def last_record(out):
    return json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])


SHORT = ["--rounds", "2", "--burn-in-rounds", "1", "--epochs", "2", "--out", "out"]


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # the command prints them
def test_stackoverflow_lr_across_the_switch_with_empty_and_single_clients(tmp_path, capsys):
    stackoverflow(tmp_path / "data")
    main(["run", "stackoverflow-lr", "--data-dir", "data", *SHORT])
    said = capsys.readouterr()
    assert "has 10 words, fewer than the 10000 asked for" in said.err
    assert "has 4 tags, fewer than the 500 asked for" in said.err
    assert "there are only 4 clients" in said.err
    record = last_record(tmp_path / "out")
    assert (record["phase"], record["train/empty"], record["train/rejected"]) == ("sampling", 1, 0)
    for split in ("eval", "valid", "test"):
        assert record[f"{split}/loss"] > 0
        for name in ("precision", "recall_at_5", "macro_f1", "micro_f1"):
            assert 0 <= record[f"{split}/{name}"] <= 1
        assert record[f"{split}/recall_at_5_p10"] <= record[f"{split}/recall_at_5_p90"]
    # Curves are those of validation, which has other examples than test.
    assert record["eval/loss"] == record["valid/loss"] != record["test/loss"]
    main(["run", "stackoverflow-lr", "--data-dir", "data", "--method", "centralized", *CENTRAL])
    # One pool of all that clients have: every example of everybody is seen once.
    central = last_record(tmp_path / "central")
    assert central["train/empty"] == 0
    assert central["test/loss"] < np.log(2)


CENTRAL = ["--rounds", "2", "--client-learning-rate", "0.5", "--out", "central"]


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_stackoverflow_nwp(tmp_path):
    stackoverflow(tmp_path / "data")
    command = ["run", "stackoverflow-nwp", "--data-dir", "data", "--eval-split", "test"]
    main([*command, "--method", "fedavg", "--rounds", "1", "--out", "out"])
    record = last_record(tmp_path / "out")
    assert record["train/empty"] == 1
    assert record["test/perplexity"] == pytest.approx(np.exp(record["test/loss"]))
    assert record["eval/loss"] == record["test/loss"] != record["valid/loss"]


def test_a_mini_batch_of_sentences_counts_words(tmp_path):
    """The loss is a mean over the batch's targets, not over its sentences' means."""
    from fedpa.objectives.objective import Objective, minibatch_loss
    from tests.experiments.models.token_losses import token_losses

    stackoverflow(tmp_path)
    with pytest.warns(UserWarning, match="fewer than"):
        problem = task_named("stackoverflow-nwp").load(
            TaskOptions(str(tmp_path), model="small-lstm")
        )
    key = jax.random.key(0)
    params = problem.init(key)
    batch = jax.tree.map(jnp.asarray, problem.clients.examples("user-3"))
    objective = Objective(problem.loss, weight=problem.weight)
    losses, mask = token_losses(params, batch)
    found = minibatch_loss(objective, params, Minibatch(batch, jnp.ones(30)), key)
    assert float(found) == pytest.approx(float(losses.sum()) / float(mask.sum()), rel=1e-5)


@pytest.mark.filterwarnings("default")
def test_emnist_takes_all_characters_before_digits_only(tmp_path):
    tiny.hdf5(tmp_path / "data", "fed_emnist_digitsonly", lambda n, s: tiny.emnist(n, s, 10))
    with pytest.warns(UserWarning, match="10 classes, not 62"):
        problem = task_named("emnist").load(TaskOptions("data"))
    assert problem.dataset == "fed_emnist_digitsonly"
    assert jax.eval_shape(problem.init, jax.random.key(0)).biases[1].shape == (10,)
    tiny.hdf5(tmp_path / "data", "fed_emnist", tiny.emnist)
    problem = task_named("emnist").load(TaskOptions("data"))
    assert jax.eval_shape(problem.init, jax.random.key(0)).biases[1].shape == (62,)


EMNIST = ["run", "emnist", "--data-dir", "data", "--rounds", "1", "--epochs", "2", "--out", "out"]
EMNIST += ["--clients-per-round", "2", "--validation-share", "0", "--method", "fedavg"]


@pytest.mark.parametrize("model", ["small-resnet", "resnet18"])
def test_cifar100_has_its_models_and_their_decay(tmp_path, model):
    tiny.hdf5(tmp_path, "fed_cifar100", tiny.cifar)
    problem = task_named("cifar100").load(TaskOptions(str(tmp_path), model=model))
    params = jax.eval_shape(problem.init, jax.random.key(0))
    told = task_named("cifar100").models[model]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == told
    batch = problem.clients.examples("c0")
    assert batch["x"].dtype == np.uint8
    assert jax.eval_shape(problem.loss, params, batch, jax.random.key(0)).shape == (3,)
    assert jax.eval_shape(problem.regularizer, params).shape == ()


@pytest.mark.long
@pytest.mark.parametrize("model", ["small-resnet", "resnet18"])
def test_cifar100_runs(tmp_path, model):
    tiny.hdf5(tmp_path / "data", "fed_cifar100", tiny.cifar, sizes=(20, 20))
    command = ["run", "cifar100", "--data-dir", "data", "--model", model, "--rounds", "3"]
    command += ["--method", "fedavg", "--epochs", "2", "--validation-share", "0", "--out", "out"]
    with pytest.warns(UserWarning, match="clients_per_round"):
        main(command)
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["train/loss"] for line in lines]
    assert losses[-1] < losses[0]


def refused(command, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(command)
    assert leaving.value.code == 2
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, said
    return lines[0]


def wrong_label(directory):
    clients = [
        ("good", tiny.emnist(3)),
        ("bad", {**tiny.emnist(2), "label": np.array([3, 62], "i4")}),
    ]
    write_hdf5(directory / "fed_emnist_train.h5", clients)
    write_hdf5(directory / "fed_emnist_test.h5", clients[:1])


def missing_split(directory):
    write_hdf5(directory / "fed_emnist_train.h5", [("a", tiny.emnist(3))])


def another_data_set(directory):
    for split in ("train", "test"):
        write_hdf5(directory / f"fed_emnist_{split}.h5", [("a", tiny.cifar(3))])


def cut_file(directory):
    tiny.hdf5(directory, "fed_emnist", tiny.emnist)
    path = directory / "fed_emnist_train.h5"
    path.write_bytes(path.read_bytes()[:-1000])


def cut_archive(directory):
    tiny.hdf5(directory / "there", "fed_emnist", tiny.emnist)
    path = directory / "fed_emnist.tar.bz2"
    tiny.archive(path, *(directory / "there").iterdir())
    for file in (directory / "there").iterdir():
        file.unlink()
    path.write_bytes(path.read_bytes()[:-200])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda directory: None, "fedpa data get fed_emnist"),
        (wrong_label, "fed_emnist_train.h5: client 'bad' has label 62: must be 0 to 61"),
        (missing_split, "fed_emnist_test.h5"),
        (another_data_set, "is not fed_emnist: client 'a' has"),
        (cut_file, "fed_emnist_train.h5"),
        (cut_archive, "fed_emnist.tar.bz2"),
    ],
)
def test_what_can_not_be_trusted_is_refused(make, says, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    make(tmp_path / "data")
    assert says in refused(EMNIST, capsys)
    assert not (tmp_path / "out" / "params.npz").exists()


@pytest.mark.filterwarnings("default")
def test_a_broken_test_split_costs_nothing_but_itself(tmp_path, capsys, monkeypatch):
    """What is looked at beforehand is refused then; the rest is read when all rounds are saved."""
    stackoverflow(tmp_path / "data")
    bad = posts(3) | {"tags": np.array(["r"] * 2, object)}
    write_hdf5(tmp_path / "data" / "stackoverflow_test.h5", [("a", posts(2)), ("bad", bad)])
    command = ["run", "stackoverflow-lr", "--data-dir", "data", "--method", "fedavg"]
    for looked_at in (True, False):
        if not looked_at:  # as if the split were large
            running = importlib.import_module("fedpa.experiments.run")  # the function has its name
            monkeypatch.setattr(running, "data_fingerprint", lambda splits: "none")
        said = refused([*command, "--rounds", "2", "--out", "out"], capsys)
        assert "stackoverflow_test.h5" in said
        assert "'bad'" in said
        assert (tmp_path / "out").exists() != looked_at
    assert list_checkpoints(tmp_path / "out")[-1] == 2
    assert last_record(tmp_path / "out")["round"] == 2


def test_nothing_is_replaced_or_made_where_data_is_missing(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "out" / "fedavg-0").mkdir(parents=True)
    for name in ("table.csv", "fedavg-0/config.toml"):
        (tmp_path / "out" / name).write_text("of an earlier comparison")
    command = ["compare", "emnist", "--data-dir", "data"]
    refused([*command, "--out", "out", "--overwrite"], capsys)
    assert (tmp_path / "out" / "table.csv").exists()
    assert (tmp_path / "out" / "fedavg-0" / "config.toml").exists()
    refused(["run", "emnist", "--data-dir", "data"], capsys)
    refused(command, capsys)
    assert not (tmp_path / "runs").exists()


def test_a_file_of_one_preset_is_not_mixed_with_another(tmp_path, capsys):
    (tmp_path / "c.toml").write_text('task = "cifar100"')
    for words, field in [
        (["--preset", "paper"], "preset = 'paper'"),
        (["emnist"], "task = 'emnist'"),
    ]:
        assert field in refused(["run", *words, "--config", "c.toml"], capsys)


def test_tasks_are_listed(tmp_path, capsys):
    tiny.hdf5(tmp_path / "data", "fed_emnist", tiny.emnist)
    main(["tasks", "--json", "--data-dir", "data"])
    listed = json.loads(capsys.readouterr().out)
    assert set(listed) == {"digits", "emnist", "cifar100", "stackoverflow-nwp", "stackoverflow-lr"}
    assert listed["emnist"]["data"]["found"]
    assert not listed["cifar100"]["data"]["found"]
    assert listed["cifar100"]["data"]["get"] == "fedpa data get fed_cifar100"
    assert listed["stackoverflow-lr"]["models"] == {"bag-of-words": 5_000_500}
    main(["tasks", "--data-dir", "data"])
    shown = capsys.readouterr().out
    assert "emnist" in shown

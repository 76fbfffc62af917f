"""The manual keeps its promises: tutorials run, links lead somewhere, every name has its place."""

import importlib.util
import re
import runpy
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import fedpa
from fedpa.experiments.cli.commands import COMMANDS
from fedpa.experiments.config import default_config, resolve
from fedpa.experiments.hyperparameters import replace_fields
from fedpa.experiments.methods import METHODS
from fedpa.experiments.run import run
from tests.federations import least_squares_clients
from tests.markdown import (
    ROOT,
    is_program,
    make_program,
    make_script,
    read_blocks,
    run_page,
    run_program,
)
from tests.test_public_names import Definition, exported, find, namespaces

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TRUTH = "np.array([1.0, -2.0, 0.5])"
CHECKS = {
    "composing.md": f"""
assert np.abs(result.params - {TRUTH}).max() < 0.15, result.params
assert isinstance(method(fedpa.Objective(min)), fedpa.Algorithm)
assert np.abs(theta - {TRUTH}).max() < 0.1, theta
""",
    "tutorials/first_run.md": """
import pathlib
assert run.round == 20 and accuracy[-1] > 2 * accuracy[0], accuracy
assert pathlib.Path("first.html").stat().st_size > 100_000
""",
    "tutorials/hospitals.md": """
import pathlib
assert posterior.converged and pooled.mean_error < 0.1 and pooled.sd_error < 0.1, pooled
slopes = [rows[f"slopes[{k}]"] for k in range(4)]
away = [(m - row.pooled_mean) / row.pooled_sd for m, row in zip(product.mean["slopes"], slopes)]
assert np.abs(away).max() > 2 * pooled.mean_error, (away, pooled)
low, high = prediction.interval(0.95)
truth = 1 / (1 + np.exp(1.5 - patients @ effects))
assert (low < truth).all() and (truth < high).all(), (prediction, truth)
assert (low < prediction.mean).all() and (prediction.mean < high).all(), prediction
odd = [row.client for row in fedpa.posterior.influence(doubtful) if row.p_value < 0.001 / 5]
assert odd == ["Bergen"] and len(caught) == 1 and "'Bergen'" in str(caught[0].message), caught
smoking, wrong, right = (way.mean["slopes"][3] for way in (posterior, doubtful, without))
assert abs(right - smoking) < 0.5 * abs(wrong - smoking), (smoking, wrong, right)
assert record["comm/bytes_up"] == 5 * 4 * 32, record
assert pathlib.Path("hospitals.png").stat().st_size > 10_000
""",
    "tutorials/own_model.md": """
import pathlib
patients = fedpa.data.pool_clients(clients, 12, seed=0).examples("pool-0")
before, after = (float(jnp.mean(loss(p, patients, None))) for p in (params, result.params))
assert after < 0.5 * before, (before, after)
assert {row["method"] for row in comparison.table} == {"FedAvg", "FedPA", "mean-scaled"}
there = {path.name for path in pathlib.Path("runs/clinics-compared").iterdir()}
assert {"curves.png", "table.csv", "report.html"} <= there, there
""",
    "tutorials/silos.md": """
import json, pathlib
last, lost = run.metrics[-1], [record for record in run.metrics if record["train/rejected"]]
assert last["round"] == 10 and last["train/rejected"] == 0, run.metrics
missing = {name for record in lost for name in record["train/rejected_clients"]}
assert missing == {f"south-{k}" for k in range(4)}, missing
assert {record["phase"] for record in run.metrics} == {"burn-in", "sampling"}
assert last["eval/accuracy"] > run.metrics[0]["eval/accuracy"], run.metrics
assert len(json.loads(pathlib.Path("../run/clients.json").read_text())["clients"]) == 12
assert pathlib.Path("../report.html").stat().st_size > 100_000
""",
    "tutorials/privacy.md": """
import pathlib
assert len(spent) == 20 and 7.9 < spent[-1] <= 8 and spent[0] < 2.5, spent
assert pathlib.Path("private.html").stat().st_size > 100_000
assert np.abs(result.params - effects).max() < 0.3, result.params
assert 2.9 < result.history[-1]["privacy/epsilon"] <= 3.0, result.history[-1]
""",
    "tutorials/pytorch.md": """
import torch
assert len(curves["fedpa"]) == len(curves["fedavg"]) == 21
assert curves["fedpa"][:6] == curves["fedavg"][:6]  # burn-in
for name, values in curves.items():
    assert values[0] < 0.2 and values[-1] > 0.9, (name, values)
assert curves["fedpa"][6:] != curves["fedavg"][6:]
assert sum(t.numel() for t in torch.load("fedpa.pt").values()) == 3818
assert open("curves.png", "rb").read(4) == b"\\x89PNG"
""",
    "tutorials/posterior.md": """
close = np.abs(np.mean(truth, axis=0) - np.mean(chains, axis=(0, 1))).max()
assert close < 0.1 and fedpa.samplers.worst(quality).rhat < 1.05, (close, quality)
assert delta.shape == theta0.shape and np.isfinite(delta).all()
""",
}
"""Page → what holds after its code has run."""
LONG = {
    "tutorials/hospitals.md",
    "tutorials/own_model.md",
    "tutorials/posterior.md",
    "tutorials/privacy.md",
    "tutorials/silos.md",
    "tutorials/pytorch.md",
}
NEEDS = {
    "tutorials/silos.md": ("flwr", "openssl", "ssh-keygen", "curl"),
    "tutorials/pytorch.md": ("flwr", "ray", "torch"),
}
"""Page → the programs and packages without which it is not run."""
TUTORIALS = [
    pytest.param(page, marks=[pytest.mark.long] if page in LONG else []) for page in CHECKS
]


def read_page(page: str) -> str:
    return (DOCS / page).read_text()


@pytest.mark.parametrize("page", TUTORIALS)
def test_the_code_of_a_tutorial_runs(page, tmp_path):
    """Its blocks in their order, then what holds afterwards.

    They are one Python program; with bash among them, one script.
    """
    for name in NEEDS.get(page, ()):
        if not (shutil.which(name) or importlib.util.find_spec(name)):
            pytest.skip(f"{page} needs {name}, which is not installed")
    blocks = read_blocks(read_page(page), "python", "sh", "bash", "toml")
    if "bash" not in dict(blocks):
        run_program(f"{make_program(blocks)}\n{CHECKS[page]}", tmp_path)
        return
    programs = [number for number, block in enumerate(blocks) if is_program(*block)]
    language, code = blocks[programs[-1]]
    blocks[programs[-1]] = language, code + CHECKS[page]
    run_page(make_script(blocks), tmp_path)


def test_every_tutorial_is_run():
    written = {str(page.relative_to(DOCS)) for page in (DOCS / "tutorials").glob("*.md")}
    assert written <= {*CHECKS}


def test_four_pieces_take_forty_lines_and_one_import():
    blocks = read_blocks(read_page("composing.md"), "python")
    (code,) = [code for _, code in blocks if "fedpa.Sampler(" in code]
    assert len(code.strip().splitlines()) <= 40
    for piece in ("fedpa.Delta(", "aggregation=clipped(", "optax.stateless("):
        assert piece in code
    assert re.findall(r"(?:import|from) (fedpa[\w.]*)", code) == ["fedpa"]
    assert not re.search(r"\b_\w+\.|\._\w+\(", code.replace("._replace(", "("))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_says_for_whom_it_is(page):
    title, audience, *_ = page.read_text().split("\n\n")
    assert re.fullmatch(r"# [^\n]+", title)
    assert re.match(r"\*For .*\*$", audience, re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What can be linked to on a page: its headings as GitHub and mkdocs write them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *ROOT.glob("*.md")], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)", text):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def test_every_public_name_is_in_the_reference():
    """With its heading, and as what mkdocstrings renders."""
    text = "".join(page.read_text() for page in (DOCS / "reference" / "api").glob("*.md"))
    rendered = re.findall(r"^## (?:class )?(fedpa\S+)\n\n::: (\S+)$", text, re.MULTILINE)
    wanted = set()
    for module in namespaces():
        for name in set(exported(module)) - {"__version__"}:
            definition = find(module, name)
            if isinstance(definition, Definition):
                wanted.add(f"{definition.module}.{name}")
    assert sorted(place for _, place in rendered) == sorted(wanted)
    names = {name.rpartition(".")[2] for name, _ in rendered}
    assert names == {place.rpartition(".")[2] for place in wanted}


def test_every_command_and_option_is_in_the_reference():
    """As `--help-all` shows them now; `python docs/write_commands.py` writes them."""
    page = read_page("reference/commands.md")
    headings = re.findall(r"^## fedpa (\S+)$", page, re.MULTILINE)
    assert sorted(headings) == sorted(COMMANDS)
    leaves = [
        f"{name} {member}".strip()
        for name, command in COMMANDS.items()
        for member in command.commands or [""]
    ]
    script = runpy.run_path(str(DOCS / "write_commands.py"))
    assert sorted(script["BLOCK"].findall(page)) == sorted(leaves)
    assert script["write_options"](page) == page, "run python docs/write_commands.py"


def read_record_keys():
    """The keys of the reference, and the beginnings of those that have any end: `eval/…`."""
    rows = re.findall(r"^\| (`.*?`) \| ", read_page("reference/records.md"), re.MULTILINE)
    keys = {key for row in rows for key in re.findall(r"`([^`]+)`", row)}
    return {key for key in keys if "…" not in key}, {key[:-1] for key in keys if "…" in key}


def train_shortly(method):
    """The keys of a run of two rounds, with validation clients."""
    config = default_config("digits", method, None)
    settings = {"rounds": 2, "clients_per_round": 3, "epochs": 2, "validation_share": 0.1}
    if METHODS[method].samples:
        settings["burn_in_rounds"] = 1
    records = run(resolve(replace_fields(config, **settings)), None).history
    return {key for record in records for key in record}


def switch_shortly():
    """The keys of a run that switches after its first round."""
    local = fedpa.LocalTraining(0.1, batch_size=4, epochs=2)
    method = fedpa.switch_at_plateau(
        lambda rounds: fedpa.fedavg(local, fedpa.Server(fedpa.server.sgd(1.0))),
        fedpa.Plateau(at_most=1),
    )
    loss, start = fedpa.objectives.least_squares.loss, np.zeros(3, np.float32)
    clients = least_squares_clients(sizes=(4, 4))
    result = fedpa.fit(loss, start, clients, method, rounds=2, clients_per_round=2, progress=False)
    return {key for record in result.history for key in record}


def lose_a_client():
    """The keys of a run with a client whose update is not finite."""
    clients = least_squares_clients(sizes=(4, 4))
    some = next(iter(clients.values()))
    clients["far"] = {name: np.full_like(rows, 1e30) for name, rows in some.items()}
    local = fedpa.LocalTraining(0.1, batch_size=4, epochs=1)
    method = fedpa.fedavg(local, fedpa.Server(fedpa.server.sgd(1.0)))
    loss, start = fedpa.objectives.least_squares.loss, np.zeros(3, np.float32)
    with pytest.warns(UserWarning, match="far"):
        result = fedpa.fit(
            loss, start, clients, method, rounds=1, clients_per_round=3, progress=False
        )
    return {key for record in result.history for key in record}


def train_privately(directory):
    """The keys of a private run, simulated and as in a deployment."""
    clients = least_squares_clients(sizes=(4, 4, 4))
    local = fedpa.LocalTraining(0.1, batch_size=4, epochs=1)
    method = fedpa.private(
        fedpa.fedavg(local, fedpa.Server(fedpa.server.sgd(1.0))),
        **{"clip": 0.5, "noise_multiplier": 1.0, "delta": 0.1},
    )
    loss, start = fedpa.objectives.least_squares.loss, np.zeros(3, np.float32)
    settings = {"rounds": 1, "clients_per_round": 2}
    simulated = fedpa.fit(loss, start, clients, method, progress=False, **settings)
    algorithm = method(fedpa.Objective(loss))
    ledger = fedpa.privacy.Ledger(directory / "privacy.jsonl")
    deployed = algorithm._replace(release=algorithm.release._replace(ledger=ledger))
    data = fedpa.data.from_mapping(clients)
    secret = fedpa.train(deployed, jnp.asarray(start), data, **settings)
    return {key for run in (simulated, secret) for record in run.history for key in record}


def infer_shortly():
    """The keys of an inference by EP with chains inside."""
    settings = {"prior": fedpa.normal_prior(sd=2.0), "inner": "nuts", "rounds": 12}

    def log_likelihood(theta, batch):
        return -0.01 * (batch["x"] @ theta - batch["y"]) ** 2  # clients that don't disagree

    clients = least_squares_clients(sizes=(8, 8))
    start = np.zeros(3, np.float32)
    records = fedpa.infer(log_likelihood, start, clients, progress=False, **settings).history
    return {key for record in records for key in record}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:a client takes part", "ignore:.*converge")
def test_every_record_key_is_in_the_reference(tmp_path):
    """What runs write is on the page, and what is on the page some run writes."""
    methods = ("fedpa", "fedexp", "global-precision", "mb-sgd", "mime", "scaffold")
    written = lose_a_client().union(switch_shortly(), infer_shortly(), *map(train_shortly, methods))
    written |= train_privately(tmp_path)
    keys, beginnings = read_record_keys()
    assert {key for key in written - keys if not key.startswith(tuple(beginnings))} == set()
    assert keys - written == set()
    assert all(any(key.startswith(start) for key in written) for start in beginnings)


def test_every_page_is_in_the_table_of_contents():
    listed = re.findall(r"[:-] (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    written = [str(page.relative_to(DOCS)) for page in PAGES]
    assert sorted(page for page in listed if not page.startswith("repository/")) == written

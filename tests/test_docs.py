"""The manual keeps its promises: tutorials run, links lead somewhere, every name has its place."""

import re
from pathlib import Path

import pytest

from fedpa.experiments.cli.commands import COMMANDS
from tests.markdown import ROOT, make_program, read_blocks, run_program
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
    "tutorials/posterior.md": """
close = np.abs(np.mean(truth, axis=0) - np.mean(chains, axis=(0, 1))).max()
assert close < 0.1 and fedpa.samplers.worst(quality).rhat < 1.05, (close, quality)
assert delta.shape == theta0.shape and np.isfinite(delta).all()
""",
}
"""Page → what holds after its code has run."""
LONG = {"tutorials/hospitals.md", "tutorials/own_model.md"}
TUTORIALS = [
    pytest.param(page, marks=[pytest.mark.long] if page in LONG else []) for page in CHECKS
]


def read_page(page: str) -> str:
    return (DOCS / page).read_text()


@pytest.mark.parametrize("page", TUTORIALS)
def test_the_code_of_a_tutorial_runs(page, tmp_path):
    """Its blocks in their order, in one process, then what holds afterwards."""
    blocks = read_blocks(read_page(page), "python", "sh")
    run_program(f"{make_program(blocks)}\n{CHECKS[page]}", tmp_path)


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


def test_every_command_is_in_the_reference():
    headings = re.findall(r"^## fedpa (\S+)$", read_page("reference/commands.md"), re.MULTILINE)
    assert sorted(headings) == sorted(COMMANDS)


def test_every_page_is_in_the_table_of_contents():
    listed = re.findall(r"[:-] (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    written = [str(page.relative_to(DOCS)) for page in PAGES]
    assert sorted(page for page in listed if not page.startswith("repository/")) == written

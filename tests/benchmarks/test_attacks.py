"""The measurement of attacks: its table has every aggregation under every attack."""

import csv

from benchmarks import attacks


def test_the_table_has_every_aggregation_and_attack(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(attacks, "SETTINGS", {"least squares": lambda: None})
    monkeypatch.setattr(
        attacks, "run_attacks", lambda setting, spelled, malicious: {"none": malicious / 3}
    )
    attacks.main([str(tmp_path / "table.csv")])
    rows = list(csv.DictReader((tmp_path / "table.csv").read_text().splitlines()))
    assert len(rows) == len(attacks.SHARES) * len(attacks.list_aggregations(0.1))
    assert {row["value"] for row in rows} == {"0.6667", "1.333", "2.667"}
    assert "trimmed mean" in capsys.readouterr().out

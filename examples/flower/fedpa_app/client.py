"""What every SuperNode runs: its own clients' rounds."""

from fedpa.experiments.flower import client_app

app = client_app()

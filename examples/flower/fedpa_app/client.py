"""What every SuperNode runs: its own clients' rounds."""

from fedpa.flower import client_app

app = client_app()

"""What the SuperLink runs."""

from fedpa.experiments.flower import server_app

app = server_app()

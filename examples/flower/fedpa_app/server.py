"""What the SuperLink runs."""

from fedpa.engines.flower import server_app

app = server_app()

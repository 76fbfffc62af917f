"""What the SuperLink runs."""

from fedpa.flower import server_app

app = server_app()

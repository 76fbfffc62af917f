"""The laboratory: what people run. Tasks, models, studies, sweeps, reports and the command."""

"""The laboratory: tasks, models, studies, sweeps, reports and the `fedpa` command."""

"""Comparisons of methods: of a task's (`fedpa compare`), on one's own model (`fedpa.compare`)."""

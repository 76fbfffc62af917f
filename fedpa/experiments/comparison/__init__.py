"""Comparisons of methods: on a task (`fedpa compare`), or on your own model (`fedpa.compare`)."""

"""Hydra's entry: compose, validate, run the task; returns the objective for sweepers."""

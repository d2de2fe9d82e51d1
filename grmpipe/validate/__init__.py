"""What a task is refused for before anything starts.

`grmpipe/config/` refuses what the configuration alone shows, for every task: a section by itself in its
`__post_init__`, sections that contradict each other in `cross_checks.py`, compositions of judges in `reward_checks.py`.
Here stands what must be looked up, or only some tasks need: slots and engines, machines, files, models and their
tokenizers. A refusal is a ConfigError that names the key and what to type.

`prepare.py`, `evaluation.py`, `retraining.py` and `meta_rm_training.py` say what a task checks, and in which order; the
other files are the checks that they share.
"""

"""The self-check of a run: ``fsdmoe check --config x.toml``, and ``train.self_check`` at the start of one."""

"""The loop, evaluation, checkpoints, logs."""

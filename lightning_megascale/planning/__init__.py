"""The planner: what a training run costs on a cluster, as pure functions of data. Nothing here imports torch."""

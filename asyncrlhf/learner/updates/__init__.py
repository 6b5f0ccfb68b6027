"""From gradients to new weights, for each layout over the ranks: DDP, FSDP2, a pipeline, DeepSpeed."""

DOORS = ("deepspeed_updater", "fsdp_updater", "optimizers", "pipeline_updater", "updaters")

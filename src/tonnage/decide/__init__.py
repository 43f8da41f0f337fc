"""What a run does: from a config to a decision, from a run to a resumption, from a checkpoint to a model."""

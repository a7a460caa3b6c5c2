"""``torch.distributed.fsdp.fully_shard`` over polyshard's engine."""

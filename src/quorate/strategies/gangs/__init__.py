"""Gangs: workers that exchange tensors by torch.distributed, as DDP and FSDP2 do."""

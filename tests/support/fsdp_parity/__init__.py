"""What PyTorch's FSDP tests assert, as functions that every rank runs: on CPU and on GPUs alike."""

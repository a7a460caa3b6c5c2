"""Forward and backward of a sharded model."""

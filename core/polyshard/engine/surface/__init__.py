"""What is asked of a sharded model between steps, by our public functions and by torch's own."""

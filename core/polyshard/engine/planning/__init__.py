"""Which parameters form units, where they lie, and what plugins answer about them. Reads the model, changes nothing."""

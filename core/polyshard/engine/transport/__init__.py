"""Memory that holds whole units, and the streams and collectives that fill and empty it."""

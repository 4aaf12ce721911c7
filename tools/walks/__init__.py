"""Which files one path through the engine passes, found by running it."""

"""Small real training runs through stateful quantizers: a kind of study. Trains nothing itself."""

"""How far tensor-core accumulation is from the exact sum: a kind of study. Knows no events and no owners."""

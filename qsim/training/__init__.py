"""A closed-loop training run on real text. Knows schedules and numbers, and nothing of sweeps."""

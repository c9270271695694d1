"""Forward and backward of the nodes of a byte-level GPT decoder. Knows arrays; no schedule, no event, no state."""

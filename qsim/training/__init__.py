"""The closed loop: a small decoder is trained through stateful quantizers. Knows no sweep."""

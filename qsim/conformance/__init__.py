"""Checks of codecs, products and quantizers, one's own included, against the definitions. Knows no sweeps."""

"""qsim: bit-exact low-precision numerics and the life of stateful quantizers. The doors, opened lazily."""

__version__ = "0.1.0"

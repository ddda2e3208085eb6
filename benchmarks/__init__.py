"""Compares the library with other code that its users run today; `python -m benchmarks` prints one table."""

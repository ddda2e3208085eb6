"""Compares the library with the code that its users run today; `python -m benchmarks` prints one table."""

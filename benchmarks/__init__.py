"""Benchmarks of the library against the code that its users run today; `python -m benchmarks` prints one table."""

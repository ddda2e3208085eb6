"""How fast the library is, beside what its users run today. `python -m benchmarks` measures and prints one table."""

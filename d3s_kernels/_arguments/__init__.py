"""Checks of arguments, and objects that each combine several arguments of an op. Imports nothing."""

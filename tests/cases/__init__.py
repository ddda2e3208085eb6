"""The table of all ops, which all checks use. For each op it has a function that draws the arguments, the exact
results, and the allowed errors of the results.
"""

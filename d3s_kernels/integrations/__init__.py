"""Selection inside trainers: a folder for each, imported only on request; and the metrics that all of them log."""

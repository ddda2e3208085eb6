"""Selection inside trainers: a folder for each trainer, imported only on request."""

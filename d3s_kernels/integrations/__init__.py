"""Selection inside trainers: one module per trainer, imported only on request."""

"""Selection inside trainers, a module for each; none is imported before you ask for it."""

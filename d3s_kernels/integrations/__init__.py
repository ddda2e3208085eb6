"""Integrates the selection into trainers. Each trainer has its own folder, which is imported only on request."""

"""Faults on purpose: which, when and where, what the clients saw meanwhile, and whether every promise was kept."""

"""Runs on record: written by the engine, replayed without a model, shown as clocks side by side."""

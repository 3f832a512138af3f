"""The model: its configuration, checkpoint families, and the one torch definition of it."""

"""The model that ships: its word problems."""

"""Engines execute the graphs; they differ only in who runs the arithmetic."""

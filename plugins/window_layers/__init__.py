"""The layers of a window step in one persistent kernel."""

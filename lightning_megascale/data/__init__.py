"""Data modules; they know nothing of the rest of the package."""

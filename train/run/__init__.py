"""A training run: its model, its optimizer, its step, and the loop over steps."""

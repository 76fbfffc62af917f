"""The paper's synthetic tables and figures, measured anew: one file each, and one of our own."""

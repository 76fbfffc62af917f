"""The paper's synthetic tables and figures, measured again: one file each, and one of our own."""

"""The coordinator: one process a job that supervises it, checkpoints it and brings it back."""

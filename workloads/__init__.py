"""Self-checking programs: set up, run, print one digest line a step, verify, say done."""

"""Checkpoints of real jobs: workloads dumped and restored at random moments (`campaign.py`)."""

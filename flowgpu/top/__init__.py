"""`flowgpu top`: jobs and stores as they are now, again and again. It disturbs no job."""

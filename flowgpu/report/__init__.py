"""What `flowgpu report` and `flowgpu trace` make of images, stores and jobs."""

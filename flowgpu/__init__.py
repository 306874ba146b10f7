"""FlowGPU: checkpoint and restore CUDA processes without changing them."""

__version__ = "0.1.0"

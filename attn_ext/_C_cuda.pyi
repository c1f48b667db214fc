"""CUDA kernels of the ops; importing it registers them."""

"""CUDA kernels of the ops; importing it registers them."""

def install_overrides() -> None:
    """Puts the CUDA kernels in the place of torch's own flash attention."""

def remove_overrides() -> None:
    """Takes them away again."""

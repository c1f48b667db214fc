def isa() -> str:
    """The instruction set of the CPU kernels in use."""

def install_overrides() -> None:
    """Puts the CPU kernels in the place of torch's own flash attention."""

def remove_overrides() -> None:
    """Takes them away again."""

def isa() -> str:
    """The instruction set of the CPU kernels in use."""

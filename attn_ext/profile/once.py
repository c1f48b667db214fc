"""One call of a variant in an NVTX range: the program that ncu profiles, see commands/ncu.py.

python -m attn_ext.profile.once VARIANT [the options of a call]
"""

from __future__ import annotations

from contextlib import nullcontext

from attn_ext.profile import options as shared
from attn_ext.profile.case import check_variants
from attn_ext.profile.trace import STEP


def main() -> None:
    program = shared.Parser(prog="attn_ext.profile.once")
    program.add_argument("variant")
    program.add_argument("--warmup", type=int, default=3)
    shared.add_shape(program)
    shared.add_device(program)
    options = program.parse_args()
    check_variants([options.variant])
    import torch

    from attn_ext.profile.calls import on_device, pick_device, pinned, prepare, synchronize

    device = pick_device(options.device)
    marked = torch.cuda.nvtx.range(STEP) if device.type == "cuda" else nullcontext()
    # ncu matches a range with the launches of its own thread: the backward pass stays on this one.
    with on_device(device), torch.autograd.set_multithreading_enabled(False):
        (call,) = prepare([options.variant], shared.case_of(options, device.type), device)
        with pinned(call):
            for _ in range(options.warmup):
                call.make()
            synchronize(device)
            with marked:
                call.make()
                synchronize(device)


if __name__ == "__main__":
    main()

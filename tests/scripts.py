"""Scripts as users have them, for `attn-ext exec`."""

#: Trains a layer of causal attention for argv[1] steps, 30 if that is no number, and says so.
TRAIN = """\
import sys
import torch
import torch.nn.functional as F

steps = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 30
device = "cuda" if torch.cuda.is_available() else "cpu"
layer = torch.nn.Linear(32, 96, device=device)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
other = torch.optim.SGD(layer.parameters(), lr=0.0)
for step in range(steps):
    x = torch.randn(2, 16, 32, device=device)
    query, key, value = layer(x).view(2, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    out.square().mean().backward()
    optimizer.step()
    other.step()
    optimizer.zero_grad()
    print("trained", step + 1)
print("at the end", __name__, sys.argv[1:])
"""

#: Attends 40 times without an optimizer.
GENERATE = """\
import torch
import torch.nn.functional as F

query, key, value = torch.randn(3, 1, 2, 16, 8)
for _ in range(40):
    query = F.scaled_dot_product_attention(query, key, value)
"""

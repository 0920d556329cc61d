"""Programs that a user starts once, and that become several ranks."""

TRAINING = """
import sys, time, torch, zeepo
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

num_ranks, num_samples = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
data = TensorDataset(torch.randn(num_samples, 6), torch.randint(3, (num_samples,)))
loader = DataLoader(data, batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(6, 17), nn.ReLU(), nn.Linear(17, 9), nn.ReLU(), nn.Linear(9, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
session = zeepo.init(zero_offload=True, num_gpus=num_ranks)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print(loss.item().hex())
with torch.no_grad():
    seen = sum(len(x) for x, _ in loader)
print(seen, session.stats().bytes_kept["optimizer state"])
zeepo.close()
total = sum(p.double().sum() for p in model.parameters())
print(float(total).hex(), sum(len(x) for x, _ in loader))
"""

WAITING = """
import os, sys, time, torch, zeepo
from torch import nn

model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
zeepo.init(model, optimizer, num_gpus=3, **eval(sys.argv[1]))
rank = int(os.environ["RANK"])
print("ready", flush=True)
print("I am rank", rank, file=sys.stderr)
with open(f"pid{rank}", "w") as file:
    file.write(str(os.getpid()))
for step in range(100000):
    model(torch.ones(2, 4)).sum().backward()
    if step == 3:
        {act}
    optimizer.step()
    optimizer.zero_grad()
    {pause}
zeepo.close()
"""


def waiting(act: str = "pass", pause: str = "pass") -> str:
    """Trains for long; in its fourth step every rank does `act`."""
    return WAITING.replace("{act}", act).replace("{pause}", pause)

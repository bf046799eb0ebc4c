"""Checks an installed wheel: it imports from site-packages, steps an optimizer, and trains on two ranks.

python wheel_smoke.py --cuda    also requires a CUDA build of torch, the CUDA kernels and NCCL, but no GPU
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import drivetrain
from drivetrain import _C, _build_info

TRAIN = """
import torch, torch.distributed as dist
from drivetrain import DistributedDataParallel as DDP
from drivetrain.optim import AdamW
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(torch.nn.Linear(8, 1))
optimizer = AdamW(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(60):
    inputs = torch.randn(32, 8)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
assert loss.item() < 0.1, loss.item()
weights = [torch.empty_like(model.module.weight) for _ in range(2)]
dist.all_gather(weights, model.module.weight.detach())
assert torch.equal(*weights)
dist.destroy_process_group()
"""


def main() -> None:
    folder = Path(_C.__file__).parent
    assert "site-packages" in str(folder), f"{folder} is not an installed package"
    assert (folder.parent / "py.typed").exists()
    assert folder.name == "torch_{}_{}".format(*torch.__version__.split(".")[:2]), folder
    libraries = {str(path.relative_to(folder.parent)) for path in folder.parent.rglob("*.so*")}
    modules = {f"{other.name}/{Path(_C.__file__).name}" for other in folder.parent.glob("torch_*")}
    assert libraries == {"libdrivetrain_kernels.so", *modules}, f"found {libraries}, expected {modules} and kernels"
    if "--cuda" in sys.argv:
        assert torch.version.cuda is not None, f"torch {torch.__version__} is a CPU build"
        built = {"kernels by nvcc": _build_info.CUDA, "NCCL": _build_info.NCCL}
        assert _C.has_cuda(), built
        assert "none" not in built.values(), built
        assert not torch.cuda.is_initialized(), "the import has initialized CUDA"
    param = torch.nn.Parameter(torch.ones(300))
    param.grad = torch.ones(300)
    drivetrain.optim.AdamW([param], lr=0.5, weight_decay=0.0).step()
    torch.testing.assert_close(param.detach(), torch.full((300,), 0.5))
    with tempfile.TemporaryDirectory() as work:
        script = Path(work) / "train.py"
        script.write_text(TRAIN)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
        subprocess.run(launch, check=True, timeout=300)
    subprocess.run([sys.executable, "-m", "drivetrain", "doctor"], check=True, timeout=120)
    print(f"drivetrain {drivetrain.__version__} works, installed in {folder}")


if __name__ == "__main__":
    main()

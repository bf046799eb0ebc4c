"""The dtypes that each lossy packing of saved tensors accepts, for the tests and for the run of every GPU kernel."""

import torch

ROUNDED = {"bfloat16": [torch.float32, torch.float64], "int8": [torch.float32, torch.bfloat16, torch.float16]}

"""Shared by all tests: one thread, so that results do not depend on the machine's load."""

import torch

torch.set_num_threads(1)

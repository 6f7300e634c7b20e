"""Tiny tensors gain nothing from threads, and waiting for each other costs tenfold on a busy machine."""

import torch

torch.set_num_threads(1)

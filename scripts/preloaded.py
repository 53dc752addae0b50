"""What the process that scripts are forked from has imported: see forks.py. No tensor is made: no thread runs."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported

import pandas  # noqa: E402, F401 - datasets and pyarrow want it
import peft  # noqa: E402, F401
import pyarrow.compute  # noqa: E402, F401
import pyarrow.parquet  # noqa: E402, F401
import torch.distributed.checkpoint  # noqa: E402, F401
import torch.distributed.fsdp  # noqa: E402, F401
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor  # noqa: E402, F401
from transformers.models.llama import modeling_llama  # noqa: E402, F401

import train_grpo  # noqa: E402, F401

"""`python run_script.py MODULE [arguments]` runs a module as a script and writes what was counted in this process."""

import atexit
import runpy
import sys

import counting
import torch

torch.set_num_threads(1)
counting.start()
atexit.register(counting.write)
del sys.argv[0]
if sys.argv[0] == "accelerate.test_utils.scripts.test_ops":
    # its `PartialState()` does not read ACCELERATE_USE_CPU, and without a GPU every rank would be a world of one
    from accelerate import PartialState

    PartialState(cpu=True)
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

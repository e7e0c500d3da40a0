"""Jobs: what train.py, eval.py and the sweeps run. The only package that may use every other one."""

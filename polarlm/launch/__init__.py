"""Jobs: what train.py, eval.py and the sweeps run. The only room that may use every other one."""

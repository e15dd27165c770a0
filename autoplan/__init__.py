"""autoplan: automatic parallelism planner and compiler for PyTorch."""

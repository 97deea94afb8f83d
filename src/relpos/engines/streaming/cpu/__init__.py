"""For CPUs only: PyTorch's flash kernel, products in bfloat16, heads in parallel threads."""

"""What is for CPUs alone: PyTorch's flash kernel there, products in bfloat16, heads side by side in threads."""

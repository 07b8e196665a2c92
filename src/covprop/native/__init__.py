"""The sources of the compiled kernels, and how they are built."""

"""intel-extension-for-pytorch, an archived library of kernels for x86 CPUs."""
